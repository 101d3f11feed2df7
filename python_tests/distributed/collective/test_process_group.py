"""The process group that is formed again while modules hold it; members are forked processes."""

import contextlib
import json
import logging
import os
import random
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from cpr_ext.distributed.collective import process_group
from cpr_ext.distributed.collective.process_group import Round, init_group
from cpr_ext.errors import PeerLostError, UsageError
from python_tests.distributed.cluster import free_port

WORLD_SIZE = 3
# A wait that ends for no other reason; and far less, on a busy machine, too.
TIME_OUT_SECONDS = 200
SOON_SECONDS = 30

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def members(nursery, tmp_path):
    """Run ``scenario(rank, group, meet)`` in forked processes; ``meet(number)`` forms a round.

    What they return, by rank; None for one that was killed.
    """

    def run(scenario):
        port = free_port()
        host = nursery.ask("call", __name__, "serve", port)
        pids = [
            nursery.ask("call", __name__, "run_member", scenario, n, str(tmp_path), port, host)
            for n in range(WORLD_SIZE)
        ]
        codes = [nursery.ask("wait", pid, 250) for pid in pids]
        for pid in (host, *pids):
            nursery.end(pid)
        assert set(codes) <= {0, -9}, codes
        files = [tmp_path / str(rank) for rank in range(WORLD_SIZE)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    return run


def serve(port):
    """Host the store of rounds until killed."""
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def run_member(scenario, rank, folder, port, host):
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = init_group(rank, WORLD_SIZE)

    def meet(number, seconds=10):
        round_store = PrefixStore(f"round {number}", store)
        this_round = Round(round_store, timedelta(seconds=seconds), "127.0.0.1")
        group.configure(this_round)
        return this_round

    meet.store, meet.host = store, host
    name, *given = scenario.split()
    said = globals()[name](rank, group, meet, *given)
    Path(folder, str(rank)).write_text(json.dumps(said))


def collectives(rank, group, meet):
    """Every kind that torch's own modules and TorchRec use, alone, in a round and in the next."""
    heard = [torch.empty(1) for _ in range(WORLD_SIZE)]
    dist.all_gather(heard, torch.tensor([5.0]))
    dist.broadcast(value := torch.tensor([rank]), 0)
    dist.barrier()
    with pytest.raises(UsageError, match="build\\(\\) runs while other workers train"):
        dist.all_reduce(torch.ones(1))
    said = [[*torch.cat(heard).tolist(), value.item()]]
    pair = dist.new_group([0, 2])
    for number in range(2):
        meet(number)
        said.append(one_of_each(rank, group, pair))
    return said


def one_of_each(rank, group, pair):
    size, said = WORLD_SIZE, {}
    summed = torch.tensor([1.0 + rank])
    dist.all_reduce(summed)
    said["all_reduce"] = summed.tolist()
    own = torch.arange(size) + 10 * rank
    out = torch.empty_like(own)
    dist.all_to_all_single(out, own, group=group, async_op=True).wait()
    said["all_to_all_single"] = out.tolist()
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([rank]), group=group)
    said["all_gather"] = torch.cat(sizes).tolist()
    gathered = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank * rank]))
    said["all_gather_into_tensor"] = gathered.tolist()
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, torch.arange(size) + 0.0)
    said["reduce_scatter_tensor"] = scattered.tolist()
    value = torch.tensor([float(rank)])
    dist.broadcast(value, 2)
    said["broadcast"] = value.tolist()
    if rank == 0:
        dist.send(torch.tensor([7]), 1)
    received = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        dist.recv(received, 0)
    else:  # of a group of some ranks, which is formed again with the whole
        dist.all_reduce(received.add_(1 + rank), group=pair)
    said["recv"] = received.tolist()
    from torch.distributed import _functional_collectives as functional

    said["functional"] = functional.all_reduce(torch.ones(1), "sum", group).tolist()
    dist.barrier()
    return said


def test_every_collective_does_what_torch_says_in_every_round(members):
    """A process that is alone hears itself, and may not exchange data."""
    for rank, (alone, *rounds) in enumerate(members("collectives")):
        assert alone == [5.0, 5.0, 5.0, rank]
        expected = {
            "all_reduce": [6.0], "all_to_all_single": [rank, rank + 10, rank + 20],
            "all_gather": [0, 1, 2], "all_gather_into_tensor": [0, 1, 4],
            "reduce_scatter_tensor": [3.0 * rank], "broadcast": [2.0], "functional": [3.0],
            "recv": [7] if rank == 1 else [4],
        }  # fmt: skip
        assert rounds == [expected, expected]


def data_parallel(rank, group, meet):
    """DistributedDataParallel is made alone, loses a member in its backward pass, and goes on."""
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    meet(0)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    before = step(model, rank)
    if rank == 2:
        os.kill(os.getpid(), 9)
    with pytest.raises(RuntimeError):
        [step(model, rank) for _ in range(100)]
    assert group.has_lost_peer()
    group.abort()
    assert not group.has_lost_peer()
    return before


def step(model, rank):
    model.zero_grad()
    model(torch.tensor([[1.0 + rank, 1.0]])).sum().backward()
    return model.module.weight.grad.tolist()


def left_with_works_kept(rank, group, meet):
    """Worker 0 leaves the round and keeps its works; how long that takes, and a peer's wait."""
    pair = dist.new_group([0, 1])
    meet(0, seconds=TIME_OUT_SECONDS)
    kept = [dist.all_reduce(torch.ones(1), group=each, async_op=True) for each in (None, pair)]
    for work in kept if rank < 2 else kept[:1]:
        work.wait()
    if rank == 2:
        return 0.0
    begin = time.monotonic()
    if rank == 0:
        kept.append(dist.all_reduce(torch.ones(1), async_op=True))  # worker 2 never makes it
        group.abort()
        seconds = time.monotonic() - begin
        meet.store.wait(["released"], timedelta(seconds=TIME_OUT_SECONDS))
        return seconds
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=pair)
    meet.store.set("released", "")
    return time.monotonic() - begin


def left_amid_messages(rank, group, meet):
    """Worker 1 leaves while 0 and 1 exchange messages; how long those of each round waited."""
    waited, chance = [], random.Random(rank)
    for number in range(10):
        meet(number, seconds=TIME_OUT_SECONDS)
        exchange = threading.Thread(target=exchange_for_ever, args=(rank, group.connect()))
        exchange.start()
        time.sleep(0.01 + 0.02 * chance.random())
        begin = time.monotonic()
        if rank == 1:
            group.abort()
        exchange.join()
        group.abort()
        waited.append(time.monotonic() - begin)
        meet.store.set(f"left {number} {rank}", "")
        meet.store.wait([f"left {number} {peer}" for peer in range(WORLD_SIZE)])
    return max(waited)


def exchange_for_ever(rank, inner):
    values, peer = torch.ones(4), 1 - rank
    with contextlib.suppress(RuntimeError):
        while rank < 2:
            for sender in (0, 1):
                operation = inner.send if rank == sender else inner.recv
                operation([values], peer, sender).wait(timedelta(seconds=TIME_OUT_SECONDS))


def amid_a_large_message(rank, group, meet, operation, leaver, how):
    """Worker 0 or 1 leaves, or dies, amid 256 MB from 1 to 0, and the other is stopped meanwhile.

    How long each waited at most.
    """
    waited = [0.0]

    def timed(call):
        begin = time.monotonic()
        try:
            call()
        except RuntimeError:  # not if the message has arrived
            assert group.has_lost_peer() or rank == leaver
        waited.append(time.monotonic() - begin)

    this_round, leaver = meet(0, seconds=TIME_OUT_SECONDS), int(leaver)
    dist.all_reduce(torch.ones(1))
    meet.store.set(f"pid {rank}", str(os.getpid()))
    values = torch.full((1 << 26,), rank % 2 + 0.0)
    if operation in ("broadcast", "future"):
        work = dist.broadcast(values, 1, async_op=True)
        work = work if operation == "broadcast" else work.get_future()  # as DDP waits, in C++
    elif rank < 2:
        work = dist.isend(values, 0) if rank == 1 else dist.irecv(values, 1)
    else:
        return 0.0
    if rank == 0:
        while values[0] == 0:
            time.sleep(0.0002)
        meet.store.set("it is under way", "")
    meet.store.wait(["it is under way"])
    if rank == leaver:
        other = int(meet.store.get(f"pid {1 - rank}"))
        os.kill(other, signal.SIGSTOP)
        if how == "dies":
            threading.Timer(1.0, os.kill, (other, signal.SIGCONT)).start()
            meet.store.set("left", "")
            time.sleep(2.0)
            os.kill(os.getpid(), 9)
        timed(group.abort)
        os.kill(other, signal.SIGCONT)
        meet.store.set("left", "")
    else:
        meet.store.wait(["left"])
        threading.Timer(0.5, this_round.end).start()  # as the rendezvous says
        threading.Timer(1.0, group.interrupt, (this_round,)).start()
    timed(work.wait)
    timed(group.abort)
    return max(waited)


@pytest.mark.parametrize(
    ("scenario", "dead"),
    [
        ("left_with_works_kept", []),
        ("left_amid_messages", []),
        ("amid_a_large_message message 0 leaves", []),
        ("amid_a_large_message message 1 dies", [1]),
        ("amid_a_large_message broadcast 1 leaves", []),
        ("amid_a_large_message future 0 leaves", []),
        ("amid_a_large_message future 1 dies", [1]),
    ],
)
def test_nothing_waits_for_a_member_that_has_left(members, scenario, dead):
    """Nor for the rest of a message, also if a peer was not scheduled meanwhile."""
    waited = members(scenario)
    assert [rank for rank, seconds in enumerate(waited) if seconds is None] == dead
    assert max(seconds or 0.0 for seconds in waited) < SOON_SECONDS


def left_without_descriptors(rank, group, meet):
    """Leave while the process has no file descriptor left; what the log reports."""
    meet(0)
    dist.all_reduce(torch.ones(1))
    reported = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())
    logging.getLogger("cpr_ext").addHandler(handler)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # None is free then, even if gloo closes some as another member leaves.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    group.abort()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return reported


def test_a_worker_that_cannot_close_connections_reports_it_and_goes_on(members):
    for rank, reported in enumerate(members("left_without_descriptors")):
        assert len(reported) == 1
        assert f"peers of worker {rank} may wait for the time-out" in reported[0]


def lost_in_reduce_scatter(rank, group, meet):
    """The last member dies; what the others notice it in, and whether the group knows."""
    pair = dist.new_group([0, 2])
    meet(0)
    dist.barrier()
    own, all_of_it = torch.empty(1), torch.ones(WORLD_SIZE)
    dist.reduce_scatter_tensor(own, all_of_it)
    if rank != 1:
        dist.barrier(group=pair)
    if rank == 2:
        os.kill(os.getpid(), 9)
    values, of = (torch.ones(2), pair) if rank == 0 else (all_of_it, group)
    with pytest.raises(RuntimeError):  # waited for later than it is called, as TorchRec does
        dist.reduce_scatter_tensor(own, values, group=of, async_op=True).wait()
    return own.item(), group.has_lost_peer()


def messages_of_one_peer(rank, group, meet):
    """What is sent and received in each way; whether that counts as a loss, with and without."""
    meet(0)
    group.connect()
    said, one = [], torch.ones(1)
    for message in (1.0, 2.0, 3.0):
        if rank == 0 and message == 2.0:
            dist.isend(torch.tensor([message]), 1).wait()
        elif rank == 0:
            dist.send(torch.tensor([message]), 1)
        if rank == 1:
            source = dist.recv(one) if message == 3.0 else dist.recv(one, 0)
            said.append((source, one.item()))
    said.append(group.has_lost_peer())
    meet.store.set(f"looked {rank}", "")
    if rank == 2:
        meet.store.wait(["looked 0", "looked 1"])
        os.kill(os.getpid(), 9)
    with pytest.raises(RuntimeError):
        dist.recv(one, 2)
    return [*said, group.has_lost_peer()]


def test_a_message_is_waited_for_as_long_as_any_collective():
    waited = []
    gloo = SimpleNamespace(rank=int, size=int)
    gloo.send = lambda: SimpleNamespace(wait=lambda time_out: waited.append(time_out) or True)
    group = process_group.Members(gloo, Round(HashStore(), timedelta(seconds=60)))
    assert group.send().wait()
    assert group.send().wait(timedelta(seconds=1))
    assert waited == [timedelta(seconds=60), timedelta(seconds=1)]


def hanging_host(rank, group, meet):
    """Nobody answers those who want to connect."""
    meet(0)
    dist.barrier()
    if rank == 0:
        os.kill(meet.host, signal.SIGSTOP)
    meet(1, seconds=1)
    with pytest.raises(PeerLostError, match=r"could not connect to all 3 within 1\.15 s"):
        dist.all_reduce(torch.ones(1))
    return group.has_lost_peer()


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("data_parallel", [[[2.0, 1.0]], [[2.0, 1.0]], None]),  # the mean of 1 + rank
        ("lost_in_reduce_scatter", [[3.0, True], [3.0, True], None]),
        (
            "messages_of_one_peer",
            [[False, True], [[0, 1.0], [0, 2.0], [0, 3.0], False, True], None],
        ),
        ("hanging_host", [True] * WORLD_SIZE),
    ],
)
def test_a_loss_is_noticed_after_all_that_arrived(members, scenario, said):
    """See the docstring of each scenario."""
    assert members(scenario) == said


class HeardOfByItsFuture:
    """A work as whoever waits for its future sees it: failed, and not marked as over yet."""

    def is_completed(self):
        return False

    def get_future(self):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("Connection reset by peer"))
        return future

    def wait(self):
        return self.get_future().wait()


def test_a_loss_that_only_a_future_tells_of_yet_is_a_loss():
    gloo = SimpleNamespace(rank=int, size=int, barrier=HeardOfByItsFuture)
    group = process_group.Members(gloo, Round(HashStore(), timedelta(seconds=60)))
    assert not group.has_failed()
    group.barrier()
    assert group.has_failed()


class EndsWithTheSlice:
    """A work that is complete just after a slice of the wait for it has timed out."""

    def __init__(self):
        self.waited = []

    def is_completed(self):
        return bool(self.waited)

    def wait(self, *time_out):
        self.waited.append(time_out)
        if len(self.waited) == 1:
            raise RuntimeError("Operation timed out!")
        return True


def test_what_ends_as_a_slice_of_its_wait_does_has_not_failed():
    gloo = SimpleNamespace(rank=int, size=int, barrier=EndsWithTheSlice)
    group = process_group.Members(gloo, Round(HashStore(), timedelta(seconds=60)))
    assert group.barrier().wait()
    assert not group.has_failed()
