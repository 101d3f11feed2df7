"""Mistakes in the library, one each: random faults must find them."""

import dataclasses

from cpr_ext.distributed import worker
from cpr_ext.distributed.parity import protection
from cpr_ext.distributed.rendezvous import meeting
from python_tests.distributed import meeting_place
from python_tests.distributed.hosts.fate_job import FateJob


class ComparesBuffers(FateJob):
    """After an exact recovery, as if they were the same on all workers."""

    def run(self):
        right = worker.Worker._compare
        worker.Worker._compare = lambda known, job, *, buffers: right(known, job, buffers=True)
        super().run()


class GoesBackAfterDeathsOnly(FateJob):
    """With full recovery; workers that hung or were cut off go on as they are."""

    def run(self):
        right = worker.decide
        worker.decide = lambda statuses, groups: right(
            [dataclasses.replace(status, has_tried=False) for status in statuses], groups
        )
        super().run()


class PublishesNothing(FateJob):
    """Of rows that are written by hand."""

    def run(self):
        protection.Protection.end_for = lambda known, obstacle: None
        super().run()


def serve_without_epochs(*given):
    """Nobody is refused who was replaced."""
    meeting.Meeting._is_superseded = lambda known, claim: False
    meeting_place.serve(*given)


def serve_without_roster(*given):
    """A rank is for who waits longest."""
    names = {"_is_superseded": False, "_is_holder": False, "_holds": False, "_is_free_for": True}
    for name, answer in names.items():
        setattr(meeting.Meeting, name, lambda known, *given, answer=answer: answer)
    meeting_place.serve(*given)
