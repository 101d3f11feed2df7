"""What a worker says of its protection is so when it is said, whatever came in between."""

import logging

import pytest

from cpr_ext.distributed.parity.protection import Protection
from cpr_ext.metrics.parity_metrics import ParityMetrics


@pytest.fixture
def protection(caplog):
    caplog.set_level(logging.INFO, "cpr_ext.parity")
    made = Protection(1, (0, 1), ParityMetrics())
    made.published = []
    made.publish = lambda: made.published.append(made._metrics.protected)
    return made


def said(caplog):
    lines, caplog.records[:] = [record.getMessage() for record in caplog.records], []
    return ["not" if "is not protected" in line else "is" for line in lines]


def test_the_begin_and_the_end_are_said_once(protection, caplog):
    protection.begin()
    assert protection.say(3, 8)
    assert not protection.say(4, 8)
    protection.end_for("row 5 was written")
    assert not protection.say(5, 8)
    assert not protection.say(6, 8)
    assert (said(caplog), protection.published) == (["is", "not"], [True, False])


def test_a_protection_that_ended_before_it_was_said_is_not_said(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    assert not protection.say(3, 8)
    assert (said(caplog), protection.published) == (["not"], [False])


def test_an_end_and_a_new_begin_are_said_in_their_order(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    protection.begin()
    assert protection.say(3, 8)
    assert (said(caplog), protection.published) == (["not", "is"], [True])


def test_what_ended_the_protection_of_a_round_is_not_said_of_the_next(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    protection.end()
    protection.begin()
    assert protection.say(9, 8)
    assert (said(caplog), protection.published) == (["is"], [True])
