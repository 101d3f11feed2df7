"""A process group that is taken down and formed again while modules keep it.

``torch.distributed``'s groups end with their first lost member, and modules keep the group they
were made with. :class:`ReformableGroup` is a process group of torch's own kind. Every collective
goes to an inner group (gloo) that lasts for one round, until the next loss of a member.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from cpr_ext.distributed.collective import torch_private
from cpr_ext.distributed.collective.connections import (
    AddressStore,
    close_connections,
    end_connecting,
)
from cpr_ext.distributed.identity.descriptors import allow_more
from cpr_ext.distributed.rendezvous.round_store import call_with_timeout
from cpr_ext.errors import PeerLostError, UsageError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

BACKEND = "cpr_ext"
# What torch.distributed, DistributedDataParallel, functional collectives and TorchRec call.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "recv_anysource"),
)
_OF_ONE_PEER = ("send", "recv", "recv_anysource")
# How long a wait takes until it looks whether its round is over; and how long it lasts after that.
_SLICE, _LAST_SECONDS = timedelta(seconds=0.5), 2.0
_FORGET_SECONDS = 0.5  # that the end of a group may take
_WHOLE_BYTES = 1 << 16  # a message of at most so many is the kernel's at once, and arrives whole
# A failed collective fails those after it, so the newest show whether one did.
_REMEMBERED = 32
# A connection to each other member, another name for it while they are closed, and subgroups.
_DESCRIPTORS, _DESCRIPTORS_EACH = 64, 4
_CONNECT_SECONDS, _CONNECT_SECONDS_EACH = 10.0, 0.05  # and for each member


@dataclass
class Round:
    """What the members of one round meet by.

    Attributes:
        store: of this round alone.
        time_out: of every collective, for which nobody may hear that the round is over.
        address: under which peers reach this process; None: what the host's name resolves to.
        is_over: set once a member has ended: nobody connects to the others any more.
        thread: that made it, which trains.
    """

    store: Store
    time_out: timedelta
    address: str | None = None
    is_over: threading.Event = field(default_factory=threading.Event)
    thread: int = field(default_factory=threading.get_ident)
    _ends_at: float = float("inf")
    _waits_since: float | None = None
    # What code in C++ waits for, where no method of a work is called; and since when.
    _awaited: dict[torch.futures.Future[None], float] = field(default_factory=dict)

    def connect_seconds(self, num_members: int) -> float:
        """Return in which time a group must form: all members are there already."""
        few = min(self.time_out.total_seconds(), _CONNECT_SECONDS)
        return few + _CONNECT_SECONDS_EACH * num_members

    def end(self, seconds: float = _LAST_SECONDS) -> None:
        """Note that a member has ended; who waits for members does so for ``seconds`` yet."""
        self._ends_at = min(self._ends_at, time.monotonic() + seconds)
        self.is_over.set()
        timer = threading.Timer(seconds, self._end_futures)
        timer.daemon = True
        timer.start()

    def has_ended(self) -> bool:
        """Return whether nobody waits for members any more."""
        return time.monotonic() >= self._ends_at

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for members, in a block."""
        if threading.get_ident() != self.thread:  # training does not wait for this
            yield
            return
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def waits_since(self) -> float | None:
        """Return since when training waits for members (monotonic); None: it does not."""
        begun = list(self._awaited.values())
        if (since := self._waits_since) is not None:
            begun.append(since)
        return min(begun, default=None)

    def bounded(self, of_gloo: Any, note_failed: Callable[[], None]) -> Any:
        """Return a future with what becomes of another one; it fails once the round has ended."""
        gate = torch.futures.Future[None]()
        self._awaited[gate] = time.monotonic()

        def value(_: Any) -> Any:
            if not of_gloo.done():
                note_failed()
                raise RuntimeError("the round has ended")
            return of_gloo.value()

        found = gate.then(value)
        of_gloo.add_done_callback(lambda _: self._open(gate))
        if self.has_ended():
            self._open(gate)
        return found

    def _open(self, gate: torch.futures.Future[None]) -> None:
        if self._awaited.pop(gate, None) is not None:
            gate.set_result(None)

    def _end_futures(self) -> None:
        for gate in list(self._awaited):
            self._open(gate)


class Members:
    """The connected members of one round, as a group of gloo whose waits end with the round.

    Gloo never ends a message whose connection ended amid it. What waits for one is abandoned.
    """

    def __init__(self, inner: dist.ProcessGroup, of_round: Round) -> None:
        self._inner: dist.ProcessGroup | None = inner
        self._rank, self._size = inner.rank(), inner.size()
        self._round = of_round
        self._works: deque[_Work] = deque(maxlen=_REMEMBERED)

    def waiting(self) -> AbstractContextManager[None]:
        """Wait for members by other means than a work, in a block."""
        return self._round.waiting()

    def rank(self) -> int:
        """Return which of them this process is."""
        return self._rank

    def size(self) -> int:
        """Return how many there are."""
        return self._size

    def __getattr__(self, operation: str) -> Callable[..., _Work]:
        """Return a collective, which returns its work."""
        if operation not in _COLLECTIVES:
            raise AttributeError(operation)
        return partial(self._call, operation)

    def has_failed(self) -> bool:
        """Return whether a collective failed."""
        return any(work.has_failed() for work in self._works)

    def forget(self) -> None:
        """Let go of gloo's group. Its end waits for what was abandoned, and is abandoned then."""
        inner, self._inner = [self._inner], None
        self._works.clear()
        with suppress(dist.DistNetworkError):
            call_with_timeout(_FORGET_SECONDS, "gloo", inner.clear)

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> _Work:
        if (inner := self._inner) is None:
            raise RuntimeError("this process has left the round")
        is_asked_once = operation in _OF_ONE_PEER or "reduce_scatter" in operation
        made = getattr(inner, operation)(*args, **kwargs)
        is_large = _num_bytes(args) > _WHOLE_BYTES
        work = (_AskedOnce if is_asked_once else _Work)(made, self._round, is_large)
        self._works.append(work)
        return work


class ReformableGroup(dist.ProcessGroup):
    """A process group whose members may be replaced. Made by :func:`init_group`, not by hand.

    Until its first :meth:`configure`, and after :meth:`abort`, the process is alone. The group then
    answers what modules ask when they are made (DistributedDataParallel compares shapes and
    broadcasts values) as if all members agreed. It refuses any other collective.

    Groups that ``dist.new_group`` makes of its ranks are taken down and formed with it.
    """

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._round: Round | None = None
        self._members: Members | None = None
        self._addresses: AddressStore | None = None  # of the members of this round
        self._subgroups: list[ReformableGroup] = []
        self._was_lost = False

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch knows this group."""
        return self._name

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """Return the backend's name."""
        return BACKEND

    def add_subgroup(self, group: ReformableGroup) -> None:
        """Have ``group`` formed and taken down together with this one."""
        self._subgroups.append(group)
        if self._round is not None:
            group.configure(self._round)

    def configure(self, new_round: Round) -> None:
        """Begin a round. Members connect at their first collective, within its time-out."""
        self.abort()
        self._round = new_round
        for group in self._subgroups:
            group.configure(new_round)

    def connect(self) -> Members:
        """Connect now; all members call it.

        Returns:
            The group of this round alone, for a thread that must not survive it.

        Raises:
            PeerLostError: not all members have connected in time.
        """
        assert self._round is not None
        if self._members is None:
            self._members = self._connect(self._round)
        return self._members

    def abort(self) -> None:
        """End the round; closed connections release the peers that wait for this process."""
        left = list(self._leave())
        try:
            close_connections([addresses for _, addresses in left])
        except OSError as error:
            logger.warning(
                "peers of worker %d may wait for the time-out of a collective: connections could "
                "not be closed: %s",
                *(self._rank, error),
            )
        for members, _ in left:
            if members is not None:
                members.forget()

    def interrupt(self, of_round: Round) -> None:
        """Close the connections of this round, so that what waits for a lost member ends.

        Called from any thread; another round is left alone.
        """
        if self._round is of_round:
            with suppress(OSError):  # what waits ends with the round
                close_connections(list(self._all_addresses()))

    def _all_addresses(self) -> Iterator[AddressStore]:
        if self._addresses is not None:
            yield self._addresses
        for group in self._subgroups:
            yield from group._all_addresses()

    def _leave(self) -> Iterator[tuple[Members | None, AddressStore]]:
        """Forget the round, here and in subgroups; yields what it has of gloo."""
        if self._round is not None:
            self._round.end(0.0)
        members, addresses = self._members, self._addresses
        self._members = self._addresses = self._round = None
        self._was_lost = False
        if addresses is not None:
            yield members, addresses
        for group in self._subgroups:
            yield from group._leave()

    def has_lost_peer(self) -> bool:
        """Return whether a collective of this round failed, here or in a subgroup."""
        if not self._was_lost and self._members is not None:
            self._was_lost = self._members.has_failed()
        return self._was_lost or any(group.has_lost_peer() for group in self._subgroups)

    def _call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        if self._round is None:
            return _answer_alone(operation, args)
        return getattr(self.connect(), operation)(*args, **kwargs)

    def _connect(self, this_round: Round) -> Members:
        store = PrefixStore(f"group/{self._name}", this_round.store)
        seconds = this_round.connect_seconds(self._world_size)
        addresses = self._addresses = AddressStore(store, seconds)
        try:
            # What it asks of a store whose host hangs has no end of its own.
            inner, gloo = call_with_timeout(
                seconds + 1.0,
                "a peer, or the rendezvous,",
                lambda: torch_private.make_group(
                    addresses, self._rank, self._world_size, seconds, this_round.address
                ),
                this_round.is_over.is_set,
            )
        except RuntimeError as error:
            self._was_lost, silent = True, list[str]()
            with suppress(OSError):
                silent = end_connecting(addresses)
            why = f"{', '.join(silent)} does not answer" if silent else str(error)
            if this_round.is_over.is_set():
                raise PeerLostError("a worker ended while others connected to it") from error
            raise PeerLostError(
                f"worker {self._rank} could not connect to all {self._world_size} within "
                f"{seconds:g} s: {why}"
            ) from error
        torch_private.set_time_out(gloo, this_round.time_out)
        return Members(inner, this_round)


def _delegate(operation: str) -> Callable[..., Any]:
    def call(self: ReformableGroup, *args: Any, **kwargs: Any) -> Any:
        return self._call(operation, *args, **kwargs)

    call.__name__ = operation
    call.__doc__ = f"``{operation}`` of the inner group."
    # Compiled modules call it between their graphs; its state is nothing for a graph.
    return torch_private.outside_graphs(call)


for _operation in _COLLECTIVES:
    setattr(ReformableGroup, _operation, _delegate(_operation))


def init_group(rank: int, world_size: int) -> ReformableGroup:
    """Make the default process group of ``torch.distributed`` one that can be formed again.

    Raises:
        UsageError: there is a default process group already, torch is one that lacks what this
            takes, or the process may not have enough open files.
    """
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already; a Worker does that itself, so leave "
            "init_process_group() out of the script"
        )
    _require_descriptors(world_size)
    torch_private.exchange_few_bytes()
    torch_private.require_known_torch()
    _made.clear()
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    # The rounds bring their own stores; this one is for torch's book-keeping in this process.
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    return _made[0]


# The default group and, behind it, its subgroups: torch knows one default group per process.
_made: list[ReformableGroup] = []


def _require_descriptors(world_size: int) -> None:
    allowed = allow_more(_DESCRIPTORS_EACH * world_size)
    if allowed < (needed := _DESCRIPTORS + world_size):
        raise UsageError(
            f"this process may have {allowed} files open, and a group of {world_size} workers "
            f"needs about {needed}: each other worker is a connection. Raise its hard limit "
            "(`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
        )


def _create(options: Any, backend_options: Any) -> ReformableGroup:
    group = ReformableGroup(options.group_rank, options.group_size, options.group_id)
    if _made:
        _made[0].add_subgroup(group)
    _made.append(group)
    return group


class _Work(dist.Work):
    """Notes how it ended, which gloo's own of some operations does not say; ends with its round."""

    def __init__(self, work: dist.Work, of_round: Round, is_large: bool) -> None:
        super().__init__()
        self._work = work
        self._round = of_round
        self._is_large = is_large
        self._has_failed = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the work that this stands for; by default, the time-out of a collective."""
        try:
            with self._round.waiting():
                return self._wait(timeout or self._round.time_out)
        except RuntimeError:
            self._has_failed = True
            raise

    def _wait(self, time_out: timedelta) -> bool:
        deadline = time.monotonic() + time_out.total_seconds()
        while not self._work.is_completed():
            try:
                return self._work.wait(_SLICE)
            except RuntimeError:
                is_due = time.monotonic() >= deadline or self._round.has_ended()
                if is_due and not self._work.is_completed():
                    raise
        return self._work.wait()  # what it ended with, perhaps as the slice did

    def has_failed(self) -> bool:
        """Return whether it failed, as far as that is known."""
        if not self._has_failed:
            try:
                # A future shows it before the work does.
                if self._work.is_completed() or self._work.get_future().done():
                    self._work.wait()  # raises again what it ended with
            except RuntimeError:
                self._has_failed = True
        return self._has_failed

    def is_completed(self) -> bool:
        """Return whether it is over, as far as gloo says."""
        return self._work.is_completed()

    def get_future(self) -> Any:
        """Return the future of the work; of a large one it ends with its round."""
        of_gloo = self._work.get_future()
        return self._round.bounded(of_gloo, self._note_failed) if self._is_large else of_gloo

    def _note_failed(self) -> None:
        self._has_failed = True

    def _source_rank(self) -> int:
        return self._work._source_rank()


class _AskedOnce(_Work):
    """Sends or receives; or a reduce-scatter.

    Gloo does not say whether these are completed, and may wait for another message if asked again.
    A time-out would end the group. So a thread waits, which is abandoned if the round ends.
    """

    def _wait(self, time_out: timedelta) -> bool:
        is_inference = torch.is_inference_mode_enabled()

        def wait() -> bool:
            with torch.inference_mode(is_inference), torch.no_grad():
                return self._work.wait(time_out)

        seconds = time_out.total_seconds() + _LAST_SECONDS
        return call_with_timeout(seconds, "a peer", wait, self._round.has_ended)

    def has_failed(self) -> bool:
        """Return whether waiting for it failed."""
        return self._has_failed


def _num_bytes(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.nbytes
    return sum(map(_num_bytes, given)) if isinstance(given, list | tuple) else 0


def _answer_alone(operation: str, args: tuple[Any, ...]) -> Any:
    """Complete a collective of a process that is alone, as if all others had said the same."""
    with torch.no_grad():
        if operation == "allgather":
            for outputs, source in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(source)
        elif operation in ("all_gather_single", "_allgather_base"):
            output, source = args[0], args[1]
            output.view(-1, source.numel()).copy_(source.reshape(1, -1))
        elif operation not in ("broadcast", "barrier"):
            raise UsageError(
                f"{operation} while a worker is alone: build() runs while other workers train or "
                "wait, so it must not exchange data; do that in the training step"
            )
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    return torch_private.completed_work(done)
