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


def test_a_round_ends_once_all_its_members_wait_for_each_other():
    host, heard = Host(), []
    host.meet("member 0", "member 1")
    job, epoch = host.job, host.job.meeting.epoch
    job.listen(10, heard.append)
    said = [job.note_waiting(rank, epoch, is_waiting=w) for rank, w in ((1, 1), (1, 0), (0, 1))]
    assert said == [
        {"others": [0], "is_first": True}, {"others": [0, 1], "is_first": False},
        {"others": [1], "is_first": True},
    ]  # fmt: skip
    host.meet("member 0", "member 1")
    assert job.note_waiting(1, epoch + 1, is_waiting=True)["others"] == [0]
    assert heard == []
    assert job.note_waiting(0, epoch + 1, is_waiting=True) == {"others": [], "is_first": True}
    assert heard == [{"lost_of": epoch + 1, "is_silent": True}]
