"""What a round costs at the rendezvous as the number of workers grows: messages and bytes."""

import itertools
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from cpr_ext.distributed.collective import torch_private
from cpr_ext.distributed.collective.process_group import ReformableGroup, Round
from cpr_ext.distributed.identity.worker_identity import Identity, TimeOuts
from cpr_ext.distributed.rendezvous import host as host_module
from cpr_ext.distributed.rendezvous import host_connection, round_store
from cpr_ext.distributed.rendezvous.meeting import Claim, Meeting
from cpr_ext.distributed.rendezvous.rendezvous import Rendezvous

SECRET = "of-the-tests-of-scale-and-of-no-other"
FEW, MANY = 4, 16
LONG = timedelta(seconds=200)
_jobs = itertools.count()
# It meets the others, and for each group it gives an address and gets those of all.
EACH = 1 + 2 * 2
FIRST_EACH = EACH + 3  # it proves twice that it knows the secret, and says that it is there


@pytest.fixture
def counted(monkeypatch, place):
    """Messages and bytes that workers have sent to this place, and received.

    Members that other tests have left send some to others.
    """
    torch_private.exchange_few_bytes()
    # Nobody asks twice, however slow this machine is.
    monkeypatch.setattr(round_store, "_SLICE_SECONDS", 60.0)
    monkeypatch.setattr(host_connection, "_ANSWER_SECONDS", 120.0)
    monkeypatch.setattr(host_module, "PROOF_SECONDS", 120.0)
    found, lock = Counter(), threading.Lock()
    send, receive = host_connection._send, host_connection._receive

    def count(connected, name, number):
        if connected.getpeername() == place:
            with lock:
                found[name] += number

    def counting_send(connected, content, deadline):
        count(connected, "messages", 1), count(connected, "bytes", len(content))
        send(connected, content, deadline)

    def counting_receive(connected, size, deadline):
        count(connected, "bytes", size)
        return receive(connected, size, deadline)

    monkeypatch.setattr(host_connection, "_send", counting_send)
    monkeypatch.setattr(host_connection, "_receive", counting_receive)
    return found


class Member:
    """What a worker does of a round, with real groups of gloo."""

    def __init__(self, rank, world_size, place, job):
        identity = Identity(rank, world_size, *place, job, address="127.0.0.1", secret=SECRET)
        self.rendezvous = Rendezvous(
            identity, TimeOuts(join_seconds=200.0, heartbeat_seconds=600.0)
        )
        self.group = ReformableGroup(rank, world_size, "0")
        self.pair = ReformableGroup(rank % 2, 2, f"pair-{rank // 2}")

    def form(self):
        this_round = Round(self.rendezvous.join(), LONG, "127.0.0.1")
        for group in (self.group, self.pair):
            group.configure(this_round)
            value = torch.ones(1)
            group.connect().allreduce([value]).wait()
            assert value == group.size()

    def leave(self):
        self.group.abort(), self.pair.abort()
        self.rendezvous.leave()


def cost_of_rounds(num_members, place, counted):
    """Of the first round of a job, and of the second."""
    with ThreadPoolExecutor(num_members) as pool:
        job = f"job {next(_jobs)}"
        members = [Member(rank, num_members, place, job) for rank in range(num_members)]
        costs = []
        for _ in range(2):
            counted.clear()
            list(pool.map(Member.form, members))
            deadline = time.monotonic() + 120.0
            while not costs and counted["messages"] < num_members * FIRST_EACH:
                assert time.monotonic() < deadline, counted
                time.sleep(0.01)  # until all have shown, from a thread, that they live
            costs.append(dict(counted))
        list(pool.map(Member.leave, members))
    return costs


def test_messages_do_not_grow_per_worker_and_bytes_grow_at_most_as_their_number(place, counted):
    few, many = (cost_of_rounds(number, place, counted) for number in (FEW, MANY))
    times = MANY / FEW
    for small, large in zip(few, many, strict=True):
        assert large["messages"] <= times * small["messages"]
        assert large["bytes"] <= times**2 * small["bytes"]
    assert few[0]["messages"] == FEW * FIRST_EACH
    assert many[1]["messages"] == MANY * EACH
    assert many[1]["bytes"] / MANY**2 < 400  # a member is given few bytes of each other


@pytest.mark.parametrize("known", [False, True])
def test_the_host_looks_at_each_worker_a_few_times_in_a_round(monkeypatch, known):
    """Each look at a waiter is an operation of the host for one process."""
    looks, right, number, meeting = [], Meeting._is_holder, 500, Meeting()
    monkeypatch.setattr(
        Meeting, "_is_holder", lambda meeting, claim: looks.append(1) or right(meeting, claim)
    )

    def meet(turn, epoch):
        for rank in range(number):
            claim = Claim(rank, number, f"member {rank}", epoch)
            token = f"{turn} {rank}"
            meeting.meet(claim, token, lease_seconds=5.0, visit=rank, now=float(turn))
        assert meeting.is_member(f"{turn} 0")

    meet(0, 0)
    if known:
        looks.clear()
        meet(1, 1)
    assert len(looks) <= 5 * number
    for rank in range(number):
        meeting.say_bye(f"member {rank}")
        meeting.leave(rank, 2.0)
    assert meeting.missing(number, 2.0) == list(range(number))
