"""Starts the workers of one machine, each supervised on its own: what dies is started again.

It knows nothing of training and needs no torch. Whether a worker's place is free, who takes part
and what is recovered is the workers' own affair; here a process is started, watched and ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cpr_ext.distributed.identity import (
    ADDRESS,
    ALIVE,
    JOB,
    LOCAL_WORLD_SIZE,
    RANK,
    RENDEZVOUS,
    SPARE,
    WORLD_SIZE,
)
from cpr_ext.errors import RendezvousError, UsageError

_POLL_SECONDS = 0.05
_HOST_START_SECONDS = 60.0
_END_SECONDS = 10.0  # between asking a worker to end and killing it
_LOOPBACK = "127.0.0.1"


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    alive_file: Path
    restarts: int = 0


@dataclass
class _Spare:
    """A process that has done its imports and waits to be told which worker it is."""

    process: subprocess.Popen[bytes]
    told: int

    def become(self, rank: int, alive_file: Path) -> bool:
        """Tell it; False if it is gone."""
        try:
            os.write(self.told, f"{rank} {alive_file}\n".encode())
        except BrokenPipeError:
            return False
        finally:
            os.close(self.told)
        return self.process.poll() is None

    def end(self) -> None:
        os.close(self.told)  # it ends by itself then


@dataclass
class Launcher:
    """Supervises workers until all are done, or one cannot be brought back.

    Args:
        command: the program of every worker.
        num_workers: how many run here.
        world_size: of the job; None: all of it runs here.
        first_rank: rank of the first worker here; the others follow.
        rendezvous: HOST:PORT where one is hosted already; None: it is hosted here, for this
            machine.
        max_restarts: how often one worker is started again before all are given up.
        hang_seconds: kill a worker that has shown no sign of life for so long; None: never. It
            must be longer than the workers' time-outs of collectives, and than loading takes.
        spares: so many processes more run the program up to where they would learn their rank. One
            of them takes the place of a worker that died, so that nobody waits for its imports.
        spare_delay_seconds: a spare is started when no worker was for so long, so that it does not
            take the processor from one that starts or recovers.
        job: distinguishes jobs that meet at the same rendezvous.
        tell: is told what happens, one sentence each.

    Raises:
        UsageError: numbers that do not fit together.
    """

    command: Sequence[str]
    num_workers: int
    world_size: int | None = None
    first_rank: int = 0
    rendezvous: str | None = None
    max_restarts: int = 10
    hang_seconds: float | None = None
    spares: int = 0
    spare_delay_seconds: float = 5.0
    job: str = "cpr"
    tell: Callable[[str], None] = print
    _children: dict[int, _Child] = field(default_factory=dict, init=False)
    _waiting: list[_Spare] = field(default_factory=list, init=False)
    _spares_lost: int = field(default=0, init=False)
    _started: float = field(default=0.0, init=False)
    _host: subprocess.Popen[str] | None = field(default=None, init=False)
    _signal: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        total = self.num_workers if self.world_size is None else self.world_size
        if self.num_workers < 1 or self.first_rank < 0:
            raise UsageError(
                f"{self.num_workers} workers from rank {self.first_rank} cannot be started"
            )
        if self.first_rank + self.num_workers > total:
            raise UsageError(
                f"ranks {self.first_rank} to {self.first_rank + self.num_workers - 1} do not fit "
                f"into a world of {total}"
            )
        if self.rendezvous is None and total > self.num_workers:
            raise UsageError(
                "workers of several machines need a rendezvous that all reach: run `python -m "
                "cpr_ext.distributed.rendezvous_host` on one and give its HOST:PORT to all"
            )

    def run(self) -> int:
        """Returns the exit code: 0 if every worker was done, 128 + n after signal n, else 1."""
        previous = {
            number: signal.signal(number, self._note_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            with tempfile.TemporaryDirectory(prefix="cpr-launch-") as folder:
                place = self.rendezvous or f"{_LOOPBACK}:{self._start_host(0)}"
                for rank in range(self.first_rank, self.first_rank + self.num_workers):
                    self._start(rank, place, Path(folder))
                return self._supervise(place, Path(folder))
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _supervise(self, place: str, folder: Path) -> int:
        done: set[int] = set()
        while len(done) < self.num_workers:
            if self._signal is not None:
                self.tell(f"{signal.Signals(self._signal).name}: ending all workers")
                return 128 + self._signal
            if self._host is not None and self._host.poll() is not None:
                self.tell("the rendezvous host died; started again")
                self._start_host(int(place.rpartition(":")[2]))
            self._start_spares(place)
            for child in list(self._children.values()):
                code = child.process.poll()
                if code is None:
                    self._kill_if_hung(child)
                elif code == 0:
                    done.add(child.rank)
                    del self._children[child.rank]
                elif child.restarts >= self.max_restarts:
                    self.tell(
                        f"worker {child.rank} {_how(code)} and was started again "
                        f"{child.restarts} times already; ending all workers. The stores keep what "
                        "was saved: the same command goes on from there"
                    )
                    return 1
                else:
                    again = child.restarts + 1
                    self.tell(
                        f"worker {child.rank} (process {child.process.pid}) {_how(code)}; started "
                        f"again ({again} of {self.max_restarts})"
                    )
                    self._start(child.rank, place, folder, restarts=again)
            time.sleep(_POLL_SECONDS)
        return 0

    def _start(self, rank: int, place: str, folder: Path, *, restarts: int = 0) -> None:
        self._started = time.monotonic()
        alive_file = folder / f"worker-{rank}"
        alive_file.touch()
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.become(rank, alive_file):
                self._children[rank] = _Child(rank, spare.process, alive_file, restarts)
                return
            spare.process.wait()
        environment = {**self._environment(place), RANK: str(rank), ALIVE: str(alive_file)}
        process = subprocess.Popen(list(self.command), env=environment)
        self._children[rank] = _Child(rank, process, alive_file, restarts)

    def _start_spares(self, place: str) -> None:
        """See that there are as many as wanted; those that end by themselves are not wanted."""
        for spare in [spare for spare in self._waiting if spare.process.poll() is not None]:
            self._waiting.remove(spare)
            spare.end()
            self._spares_lost += 1
            self.tell(f"a spare worker {_how(spare.process.returncode)}")
        if time.monotonic() < self._started + self.spare_delay_seconds:
            return
        while len(self._waiting) < self.spares and self._spares_lost <= self.max_restarts:
            reading, writing = os.pipe()
            environment = {**self._environment(place), SPARE: str(reading)}
            process = subprocess.Popen(list(self.command), env=environment, pass_fds=[reading])
            os.close(reading)
            self._waiting.append(_Spare(process, writing))

    def _environment(self, place: str) -> dict[str, str]:
        environment = {
            **os.environ,
            WORLD_SIZE: str(self.num_workers if self.world_size is None else self.world_size),
            LOCAL_WORLD_SIZE: str(self.num_workers),
            RENDEZVOUS: place,
            JOB: self.job,
        }
        if self.rendezvous is None:
            environment[ADDRESS] = _LOOPBACK
        return environment

    def _start_host(self, port: int) -> int:
        """Host the rendezvous in a process of its own; returns its port."""
        module = "cpr_ext.distributed.rendezvous_host"
        self._host = subprocess.Popen(
            [
                *(sys.executable, "-m", module),
                *("--with-parent", "--host", _LOOPBACK, "--port", str(port)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._host.stdout is not None
        is_said, _, _ = select.select([self._host.stdout], [], [], _HOST_START_SECONDS)
        said = self._host.stdout.readline() if is_said else ""
        if not said:
            raise RendezvousError(f"the rendezvous could not be hosted on port {port}")
        return int(said.split()[-1])

    def _kill_if_hung(self, child: _Child) -> None:
        if self.hang_seconds is None:
            return
        silent_seconds = time.time() - child.alive_file.stat().st_mtime
        if silent_seconds > self.hang_seconds:
            self.tell(
                f"worker {child.rank} (process {child.process.pid}) has been silent for "
                f"{silent_seconds:.0f} s; killing it"
            )
            child.process.kill()
            child.process.wait()

    def _end_all(self) -> None:
        processes = [child.process for child in self._children.values()]
        processes += [spare.process for spare in self._waiting]
        for spare in self._waiting:
            spare.end()
        for process in processes:
            process.send_signal(self._signal or signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._host is not None:
            self._host.kill()
            self._host.wait()
            assert self._host.stdout is not None
            self._host.stdout.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
