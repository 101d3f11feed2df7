"""What the rendezvous' host tells of a death to those who are left."""

import asyncio

import pytest

from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.meeting import Claim
from cpr_ext.distributed.rendezvous.served_job import ServedJob


class Host:
    """Two workers; they have connections 10 and 11."""

    def __init__(self):
        self.now, self.job = 0.0, ServedJob(0.0)

    def meet(self, *members):
        self.now += 1.0

        async def meet():
            for rank, member in enumerate(members):
                meeting, visit = self.job.meeting, 10 + rank
                epoch = meeting.epoch if member in meeting.roster else 0
                claim = Claim(rank, 2, member, epoch, who=f"who is {member}")
                token = f"{member} at {self.now}"
                async with self.job.changing():
                    meeting.meet(claim, token, lease_seconds=9.0, visit=visit, now=self.now)

        asyncio.run(meet())
        return wire.unpack(self.job.members())[2]


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (("",), "_OTHER: its process is gone"),
        (("silent", "SIGKILL"), "timeout: nothing is heard"),
        (("KeyError: 1\n2", "SIGKILL"), "KeyError: 1"),
        (("E: " + "x" * 900,), "E: " + "x" * 197),
    ],
)
def test_who_is_left_learns_once_what_was_said_first_of_a_death(ends, why):
    host = Host()
    host.meet("member 0", "member 1")
    for said in ends:
        if said == "silent":
            host.job.tell_of_end(11, is_silent=True)
        elif said:
            host.job.note_end("who is member 1", said)
    host.job.meeting.leave(11, host.now)
    [(rank, told)] = host.meet("member 0", "another")
    assert (rank, told[: len(why)]) == (1, why)
    assert len(told) <= 200
    assert host.meet("member 0", "another") == []
