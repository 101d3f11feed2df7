"""Who a worker is: a stable number, the shards that go with it, and the right to be the only one.

The identity of a worker is its rank. The process that replaces a dead one has the same rank, and
with it the same shards and store directory. The world size never changes.
"""

from __future__ import annotations

import fcntl
import glob
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cpr_ext.distributed.identity import descriptors
from cpr_ext.distributed.identity.job_secret import read_secret
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.storage.filesystem import make_directory, open_regular
from cpr_ext.storage.job_stores import worker_directory as worker_directory

RANK, WORLD_SIZE = "CPR_RANK", "CPR_WORLD_SIZE"
RENDEZVOUS, JOB, ADDRESS = "CPR_RENDEZVOUS", "CPR_JOB", "CPR_ADDRESS"
# An agent says who it is (with its process number) and how many nodes there are. Its workers learn
# at the rendezvous which one is theirs.
AGENT, NODES = "CPR_AGENT", "CPR_NODES"
# How many workers a machine has; TorchRec's plans by host ask for it under this name.
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_POLL_SECONDS = 0.05
_ASK_SECONDS = 1.0  # from one question whether a holder is given up to the next


def lock_holders(path: Path) -> list[int]:
    """Return the processes of this machine that hold a lock on ``path``, as far as we may see."""
    found = set()
    # Path.glob() fails at a process that ends meanwhile.
    for descriptor in map(Path, glob.iglob("/proc/[0-9]*/fd/*")):  # noqa: PTH207
        with suppress(OSError):  # closed by now
            details = descriptor.parents[1] / "fdinfo" / descriptor.name
            if os.path.samestat(descriptor.stat(), path.stat()) and "FLOCK" in details.read_text():
                found.add(int(descriptor.parts[2]))
    return sorted(found)


def describe_holders(path: Path, taken_by: str) -> str:
    """Say who holds the lock on ``path``, as a clause.

    Args:
        taken_by: process number that the lock file names; may be empty or of a dead process.
    """
    holders = lock_holders(path)
    names = ", ".join(map(str, holders))
    if taken_by in map(str, holders):
        return f"is still process {taken_by}"
    if holders:
        return f"is gone, but what it started still holds its lock: process {names}"
    return f"is perhaps still process {taken_by or 'unknown'}, which is not seen from this machine"


@dataclass(frozen=True)
class TimeOuts:
    """How long a worker waits, and for what.

    Attributes:
        collective_seconds: for its peers in a collective. Then a warning names who is slow. If all
            wait for each other, connections are broken, and they meet again.
        join_seconds: until all workers are there, replacements included; then the job ends. Also
            how much longer a collective waits for a worker that lives.
        heartbeat_seconds: between two signs of life in the rendezvous; with five missing, a worker
            that died while it waited is not waited with any longer. At least 0.5.
        identity_seconds: for a predecessor that still holds this worker's place.

    Raises:
        UsageError: one is not above 0.
    """

    collective_seconds: float = 60.0
    join_seconds: float = 600.0
    heartbeat_seconds: float = 1.0
    identity_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Identity:
    """One of the workers of a job, and where they meet.

    Attributes:
        rank: this worker, from 0; kept by the process that replaces it.
        world_size: how many workers there are.
        host, port: of the rendezvous.
        job: distinguishes jobs that meet at the same place.
        address: under which peers reach this worker; None: what the host's name resolves to.
        secret: known to the job's processes only; nobody joins the job without.

    Raises:
        UsageError: a value out of its range.
    """

    rank: int
    world_size: int
    host: str
    port: int
    job: str = "cpr"
    address: str | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"worker {self.rank} of {self.world_size} cannot be: ranks go from 0 to the world "
                f"size less one; set {RANK} and {WORLD_SIZE}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Identity:
        """Read this worker's variables, or those of Slurm or Kubernetes for rank and size.

        Raises:
            UsageError: a variable is missing or malformed; names it.
        """
        known = os.environ if environment is None else environment
        rank = _whole(known, RANK, "SLURM_PROCID", "JOB_COMPLETION_INDEX")
        world_size = _whole(known, WORLD_SIZE, "SLURM_NTASKS")
        place = known.get(RENDEZVOUS, "")
        host, _, port = place.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(
                f"{RENDEZVOUS} is {place!r}; needed: HOST:PORT of the rendezvous, as `cpr launch` "
                "sets it, or where `python -m cpr_ext.distributed.rendezvous_host` runs"
            )
        host = host.removeprefix("[").removesuffix("]")
        address = known.get(ADDRESS) or _own_address(host)
        job, secret = known.get(JOB, "cpr"), read_secret(known)
        return cls(rank, world_size, host, int(port), job, address, secret)


def _own_address(rendezvous_host: str) -> str | None:
    """Loopback if all of the job is on this machine, as its rendezvous is reached by loopback."""
    if rendezvous_host == "::1":
        return rendezvous_host
    is_loopback = rendezvous_host == "localhost" or rendezvous_host.startswith("127.")
    return "127.0.0.1" if is_loopback else None


def _whole(environment: Mapping[str, str], *names: str) -> int:
    for name in names:
        if (text := environment.get(name)) is not None:
            if not text.isdecimal():
                raise UsageError(f"{name} is {text!r}; needed: a whole number")
            return int(text)
    raise UsageError(
        f"{names[0]} is not set; start the script with `cpr launch --nproc N SCRIPT` or `torchrun "
        f"--rdzv-backend=cpr`, or set {RANK}, {WORLD_SIZE} and {RENDEZVOUS} for each worker"
    )


class RankLock:
    """The rank of one worker in the job, taken by at most one living process.

    An advisory lock next to the worker's store; it ends with its process. A process that is stopped
    or hangs keeps it, so that no second one takes its shards. That of a process that
    the others wait for no more is not heeded. The lock files are replaced, so that it writes
    nothing any more.

    Args:
        member: distinguishes this process from others of its rank.
        is_given_up: returns of another one whether the others wait for it no more.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        identity: Identity,
        member: str = "",
        is_given_up: Callable[[str], bool] = lambda member: False,
    ) -> None:
        self._member, self._is_given_up = member, is_given_up
        self._store = worker_directory(directory, identity.rank, identity.world_size)
        self._path = self._store.with_name(f"{self._store.name}.lock")
        self._rank = identity.rank
        self._descriptor: int | None = None
        self._asks_from = 0.0

    def acquire(self, wait_seconds: float) -> None:
        """Wait until this process has the rank, and no other the locks of its store.

        Processes that a killed predecessor had started, such as data-loader workers, may keep its
        locks for some seconds.

        Raises:
            StoreError: another process still had it when the time ran out; names it.
            StorageError: the directory cannot be made or written.
        """
        make_directory(self._path.parent)
        deadline = time.monotonic() + wait_seconds
        descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        try:
            while not self._try(descriptor, fcntl.LOCK_EX):
                self._wait_or_fail(descriptor, self._path, deadline, wait_seconds)
                if self._overrule(descriptor) or not _is_at(self._path, descriptor):
                    os.close(descriptor)
                    descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {self._member}\n".encode(), 0)
            self._wait_for_store(deadline, wait_seconds)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptors.keep_from_children(descriptor)

    def release(self) -> None:
        """Release the rank for a successor."""
        if self._descriptor is not None:
            descriptors.release(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _wait_for_store(self, deadline: float, wait_seconds: float) -> None:
        for path in sorted(self._store.glob("**/LOCK")):
            descriptor = open_regular(path)
            try:
                while not self._try(descriptor, fcntl.LOCK_SH):
                    self._wait_or_fail(descriptor, path, deadline, wait_seconds)
            finally:
                os.close(descriptor)

    def _try(self, descriptor: int, kind: int) -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait_or_fail(
        self, descriptor: int, path: Path, deadline: float, wait_seconds: float
    ) -> None:
        if time.monotonic() < deadline:
            return time.sleep(_POLL_SECONDS)
        taken_by, _ = _holder_in(descriptor)
        raise StoreError(
            f"worker {self._rank} {describe_holders(path, taken_by)} after {wait_seconds:g} s "
            f"(its lock: '{path}'); if that process hangs, end it"
        )

    def _overrule(self, descriptor: int) -> bool:
        """Replace all locks of a holder that the others wait for no more."""
        now = time.monotonic()
        _, member = _holder_in(descriptor)
        if not member or now < self._asks_from:
            return False
        self._asks_from = now + _ASK_SECONDS
        if not self._is_given_up(member):
            return False
        for path in (*self._store.glob("**/LOCK"), self._path):
            with suppress(FileNotFoundError):
                path.unlink()
        return True


def _holder_in(descriptor: int) -> tuple[str, str]:
    """Return the process number and the member that a lock file names; empty: none."""
    number, _, member = os.pread(descriptor, 64, 0).decode(errors="replace").strip().partition(" ")
    return number, member


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
