"""What a worker says of its protection is so when it is said, whatever came in between."""

import logging

import pytest

from cpr_ext.distributed.parity.protection import Protection
from cpr_ext.saving.metrics import ParityMetrics


@pytest.fixture
def protection(caplog):
    caplog.set_level(logging.INFO, "cpr_ext.parity")
    return Protection(1, (0, 1), ParityMetrics())


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
    assert said(caplog) == ["is", "not"]


def test_a_protection_that_ended_before_it_was_said_is_not_said(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    assert not protection.say(3, 8)
    assert said(caplog) == ["not"]


def test_an_end_and_a_new_begin_are_said_in_their_order(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    protection.begin()
    assert protection.say(3, 8)
    assert said(caplog) == ["not", "is"]


def test_what_ended_the_protection_of_a_round_is_not_said_of_the_next(protection, caplog):
    protection.begin()
    protection.end_for("row 5 was written")
    protection.end()
    protection.begin()
    assert protection.say(9, 8)
    assert said(caplog) == ["is"]


def test_machines_that_have_several_of_the_group_are_named_by_one_worker_when_that_changes(caplog):
    caplog.set_level(logging.INFO, "cpr_ext.parity")
    for rank, times in ((0, 1), (1, 0)):
        metrics = ParityMetrics()
        protection = Protection(rank, (0, 1), metrics)
        caplog.clear()
        loopback = ["127.0.0.1"] * 3
        for machines, at_risk in ((loopback, 0), ("aac", 1), ("aac", 1), ("abc", 0), ("abd", 0)):
            protection.note_machines(machines)
            assert metrics.machines_at_risk == at_risk
        text = "group [0, 1] is not protected against the loss of machine a, which has its workers"
        assert caplog.text.count(f"{text} [0, 1]") == times
        assert (
            caplog.text.count("each worker of parity group [0, 1] has a machine of its own")
            == times
        )
