"""When a living agent leaves its node to another one, as the rendezvous' host decides it."""

import asyncio

import pytest

from cpr_ext.distributed.rendezvous import served_job, wire
from cpr_ext.distributed.rendezvous.meeting import Claim
from cpr_ext.distributed.rendezvous.nodes import STEADY_SECONDS, Agent
from cpr_ext.distributed.rendezvous.served_job import ServedJob

MEMBERS = ("member 0", "member 1")
MOVED = [(1, {"node": None}), (2, {"node": 1})]


class Host:
    """Machine a has both nodes, machine b waits; the workers have connections 10 and 11."""

    def __init__(self, monkeypatch):
        self.now, self.said = 0.0, []
        monkeypatch.setattr(served_job.time, "monotonic", lambda: self.now)
        self.job = ServedJob(0.0)
        self.attend(0, "a"), self.attend(1, "a")
        assert self.look() == [(0, {"node": 0})]
        assert self.look(1.0) == [(1, {"node": 1})]
        self.attend(2, "b")
        self.job.nodes.note_ready("agent 2")

    def attend(self, visit, machine):
        agent = Agent(f"agent {visit}", 2, machine, self.now, adopt_seconds=1.0)
        self.job.nodes.attend(agent, visit)
        self.job.listen(visit, lambda news: self.said.append((visit, news)))

    def look(self, seconds=0.0):
        self.now += seconds
        asyncio.run(self.job.assign())
        said, self.said = self.said, []
        return said

    def meet(self, members=MEMBERS):
        async def meet():
            for rank, member in enumerate(members):
                meeting, visit = self.job.meeting, 10 + rank
                epoch = meeting.epoch if member in meeting.roster else 0
                claim = Claim(rank, 2, member, epoch, who=f"who is {member}")
                self.job.note_must_not_be_lost(member)
                token = f"{member} at {self.now}"
                async with self.job.changing():
                    self.job.meeting.meet(
                        claim, token, lease_seconds=9.0, visit=visit, now=self.now
                    )

        asyncio.run(meet())

    def train(self, *members):
        for member in members:
            self.job.note_may_be_lost(member, self.job.meeting.epoch, [0, 1])


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


def test_a_node_moves_once_all_workers_train_and_are_protected(host):
    assert host.look(STEADY_SECONDS) == []
    host.meet()
    host.train(MEMBERS[0])
    assert host.look() == []
    host.train(MEMBERS[1])
    assert host.look() == MOVED
    assert host.look(1.0) == []


def test_nothing_moves_while_workers_meet_again(host):
    host.meet()
    host.train(*MEMBERS)
    host.job.note_must_not_be_lost(MEMBERS[0])
    assert host.look(STEADY_SECONDS) == []
    host.meet()
    host.job.note_may_be_lost(MEMBERS[0], 1, [])  # late, and of the round before
    host.train(MEMBERS[1])
    assert host.look() == []
    host.train(MEMBERS[0])
    assert host.look() == MOVED


def test_nothing_moves_once_a_member_has_ended(host):
    host.meet()
    host.train(*MEMBERS)
    host.job.listen(10, lambda news: None)
    host.job.tell_of_end(10)
    host.said.clear()
    assert host.look(STEADY_SECONDS) == []


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (("",), "_OTHER: its process is gone"),
        (("silent", "SIGKILL"), "timeout: nothing is heard"),
        (("KeyError: 1\n2", "SIGKILL"), "KeyError: 1"),
        (("E: " + "x" * 900,), "E: " + "x" * 197),
    ],
)
def test_who_is_left_learns_once_what_was_said_first_of_a_death(host, ends, why):
    host.meet()
    for said in ends:
        if said == "silent":
            host.job.tell_of_end(11, is_silent=True)
        elif said:
            host.job.note_end("who is member 1", said)
    host.job.meeting.leave(11, host.now)
    host.now += 1.0
    host.meet((MEMBERS[0], "another"))
    [(rank, told)] = wire.unpack(host.job.members())[2]
    assert rank == 1
    assert told.startswith(why)
    assert len(told) <= 200
    host.now += 1.0
    host.meet((MEMBERS[0], "another"))
    assert wire.unpack(host.job.members())[2] == []
