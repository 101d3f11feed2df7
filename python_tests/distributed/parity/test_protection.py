"""What a worker says of its protection, and of a rebuild, is so when it is said."""

import logging

import pytest

from cpr_ext.distributed.parity.protection import Protection
from cpr_ext.saving.metrics import ParityMetrics


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ("begin say again ends again", "is not"),
        ("begin ends again", "not"),  # before it was said
        ("begin ends begin say", "not is"),
        ("begin ends end begin say", "is"),  # of the next round
    ],
)
def test_the_begin_and_the_end_are_said_once_and_in_their_order(caplog, events, said):
    """A line for each; ``say`` returns whether it said that all are protected."""
    caplog.set_level(logging.INFO, "cpr_ext.parity")
    protection = Protection(1, (0, 1), ParityMetrics())
    given = {"ends": ("end_for", "row 5 was written"), "say": ("say", 3, 8), "again": ("say", 4, 8)}
    for event in events.split():
        act, *arguments = given.get(event, (event,))
        if (answer := getattr(protection, act)(*arguments)) is not None:
            assert answer == (event == "say")
    lines = [record.getMessage() for record in caplog.records]
    assert ["not" if "is not protected" in line else "is" for line in lines] == said.split()


def test_machines_that_have_several_of_the_group_are_named_by_one_worker_when_that_changes(caplog):
    caplog.set_level(logging.INFO, "cpr_ext.parity")
    text = "group [0, 1] is not protected against the loss of machine a, which has its workers"
    for rank, times in ((0, 1), (1, 0)):
        metrics = ParityMetrics()
        protection = Protection(rank, (0, 1), metrics)
        caplog.clear()
        loopback = ["127.0.0.1"] * 3
        for machines, at_risk in ((loopback, 0), ("aac", 1), ("aac", 1), ("abc", 0), ("abd", 0)):
            protection.note_machines(machines)
            assert metrics.machines_at_risk == at_risk
        own = "each worker of parity group [0, 1] has a machine of its own"
        assert [caplog.text.count(said) for said in (f"{text} [0, 1]", own)] == [times, times]
