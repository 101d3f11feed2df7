"""Starts and supervises the workers of one machine, and restarts those that die.

The launcher knows nothing of training and needs no torch. The workers themselves decide which ranks
are free, who takes part and what to recover.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from cpr_ext.distributed.host_process import HostProcess
from cpr_ext.distributed.identity.end_with_parent import end_with
from cpr_ext.distributed.identity.job_secret import hand_over, read_secret, require_secret
from cpr_ext.distributed.identity.supervision import SignsOfLife
from cpr_ext.distributed.identity.worker_identity import (
    ADDRESS,
    ALIVE,
    JOB,
    LOCAL_WORLD_SIZE,
    RANK,
    RENDEZVOUS,
    SPARE,
    WORLD_SIZE,
)
from cpr_ext.distributed.output import Output
from cpr_ext.distributed.rendezvous_host import LOOPBACK
from cpr_ext.errors import UsageError
from cpr_ext.runtime.termination import EXIT_CODE

_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 1.0  # for what a process wrote before it ended
_INTERRUPT_SECONDS = 3.0  # in which workers end by themselves on Ctrl-C
_END_SECONDS = 25.0  # in which a worker saves and ends on SIGTERM, before it is killed
# A worker that ended so often in the same way, each time so early, cannot start at all.
_STARTS = 3
_EARLY_SECONDS = 25.0
_PROGRESS_SECONDS = 2.0  # at least so long from one line of a worker's progress to the next
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch's, for large tensors in the processor's memory
_THREADS = "OMP_NUM_THREADS"
_UNBUFFERED = "PYTHONUNBUFFERED"
# A life of so long makes up for the restarts before it.
_HEALTHY_SECONDS = 600.0
_RESUME = "the same command resumes from there"


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    signs: SignsOfLife
    restarts: int = 0
    # How many lives before this one ended with this code, early and one after the other.
    vain_starts: int = 0
    vain_code: int = 0
    # By which error it ended, and how many lives did so one after the other.
    failure: str = ""
    failures: int = 0
    memory_kills: int = field(default_factory=lambda: _memory_kills())
    started: float = field(default_factory=time.monotonic)
    shown: str = ""  # of its progress
    shown_at: float = 0.0
    output: Output | None = None

    def new_progress(self, *, at_once: bool = False) -> str:
        """Return what is to be shown of the worker's progress; empty: nothing yet."""
        text = self.signs.progress()
        if text == self.shown:
            return ""
        if not at_once and time.monotonic() < self.shown_at + _PROGRESS_SECONDS:
            return ""
        self.shown, self.shown_at = text, time.monotonic()
        return text

    def note_end(self, code: int) -> None:
        before, self.failure = self.failure, self.signs.failure()
        self.failures = self.failures + 1 if self.failure == before else 1
        lived_seconds = time.monotonic() - self.started
        if lived_seconds > _HEALTHY_SECONDS:
            self.restarts = 0
        is_early = lived_seconds < _EARLY_SECONDS
        if code >= 0 and is_early and not self.signs.was_alive():
            self.vain_starts = self.vain_starts + 1 if code == self.vain_code else 1
            self.vain_code = code
        else:
            self.vain_starts = 0

    def how(self, code: int) -> str:
        """Return how it ended, and why."""
        times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
        had_memory = code != -signal.SIGKILL or _memory_kills() == self.memory_kills
        memory = "" if had_memory else " (and the kernel has killed for want of memory meanwhile)"
        return _how(code) + memory + (f" by {self.failure}{times}" if self.failure else "")


@dataclass
class _Spare:
    """A process that has done its imports and waits for its rank."""

    process: subprocess.Popen[bytes]
    rank_pipe: int
    output: Output | None = None

    def become(self, rank: int, alive_file: Path) -> bool:
        """Send it the rank; return False if it has ended."""
        try:
            os.write(self.rank_pipe, f"{rank} {alive_file}\n".encode())
        except BrokenPipeError:
            return False
        finally:
            os.close(self.rank_pipe)
        return self.process.poll() is None

    def end(self) -> None:
        os.close(self.rank_pipe)  # it ends by itself then


@dataclass
class Launcher:
    """Supervises workers until all are done, or one cannot be restarted.

    Each worker has its share of the cores: ``OMP_NUM_THREADS`` is set, unless it is set already.

    Args:
        command: the program of every worker.
        num_workers: how many run here.
        world_size: of the job; None: all of it runs here.
        first_rank: rank of the first worker here; the others follow.
        rendezvous: HOST:PORT where one is hosted already; None: it is hosted here, for this
            machine.
        max_restarts: restarts of one worker before the launcher ends all of them. Those before a
            life of 10 minutes do not count.
        hang_seconds: kill a worker that has shown no sign of life for so long; None: never. It
            must be longer than the workers' time-outs of collectives, and than loading takes.
        spares: so many processes more run the program up to where they would learn their rank. One
            of them takes the place of a worker that died, so that nobody waits for its imports.
        spare_delay_seconds: start a spare only after this time without the start of a worker;
            so it takes no processor time from one that starts or recovers.
        prefixes: lines that workers write begin with their rank, as ``[3]``.
        log_dir: these lines go to a file for each worker there, too, without prefix; with
            ``prefixes``.
        job: distinguishes jobs that meet at the same rendezvous.
        report: called with each event, one sentence.

    Raises:
        UsageError: numbers that do not fit together, or a ``rendezvous`` elsewhere without the
            job's secret in the environment. Where it is hosted here, a secret is made.
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
    prefixes: bool = False
    log_dir: Path | None = None
    job: str = "cpr"
    report: Callable[[str], None] = print
    _children: dict[int, _Child] = field(default_factory=dict, init=False)
    _waiting: list[_Spare] = field(default_factory=list, init=False)
    _spares_lost: int = field(default=0, init=False)
    _started: float = field(default=0.0, init=False)
    _host: HostProcess | None = field(default=None, init=False)
    _hosts_lost: int = field(default=0, init=False)
    _host_started: float = field(default=0.0, init=False)
    _environment: dict[str, str] = field(default_factory=dict, init=False)
    _keep_secret: Callable[[], None] = field(default=lambda: None, init=False)
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
        if self.rendezvous is not None:
            require_secret(read_secret(os.environ), self.rendezvous)
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Run all workers; return 0 if every worker was done, 128 + n after signal n, else 1."""
        previous = {
            number: signal.signal(number, self._note_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
        }
        try:
            with tempfile.TemporaryDirectory(prefix="cpr-launch-") as folder:
                self._environment = self._make_environment(Path(folder))
                for rank in range(self.first_rank, self.first_rank + self.num_workers):
                    if self._signal is None:
                        self._start(rank, Path(folder))
                return self._supervise(Path(folder))
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _supervise(self, folder: Path) -> int:
        done: set[int] = set()
        left: set[int] = set()  # other processes have their ranks
        while len(done) + len(left) < self.num_workers:
            if self._signal is not None:
                self._say(f"{signal.Signals(self._signal).name}: ending all workers")
                return 128 + self._signal
            if not self._see_to_host():
                return 1
            self._start_spares()
            for child in list(self._children.values()):
                code = child.process.poll()
                if text := child.new_progress(at_once=code is not None):
                    self._say(text)
                if code is None:
                    self._kill_if_hung(child)
                elif code == 0 and child.signs.is_done():
                    done.add(child.rank)
                    self._drop(child)
                elif reason := child.signs.left():
                    self._say(f"{reason}; not started again")
                    left.add(child.rank)
                    self._drop(child)
                elif not self._start_again(child, code, folder):
                    return 1
            if self._children:
                _wait_for_an_end([child.process for child in self._children.values()])
        return 1 if left else 0

    def _drop(self, child: _Child) -> None:
        del self._children[child.rank]
        if child.output is not None:
            child.output.finish(_DRAIN_SECONDS)

    def _start_again(self, child: _Child, code: int, folder: Path) -> bool:
        """Start a worker that ended with ``code``; False if that would not help."""
        child.note_end(code)
        self._drop(child)
        if reason := child.signs.reason():
            self._say(f"{reason}; ending all workers. The stores keep what was saved: {_RESUME}")
            return False
        if child.vain_starts >= _STARTS:
            self._say(
                f"worker {child.rank} {_how(code)} {child.vain_starts} times in a row soon after "
                "its start, before it joined the others: the script cannot start, its own messages "
                "say why; ending all workers. The stores are unchanged"
            )
            return False
        again = child.restarts + (code != EXIT_CODE)  # it left as planned, with that one
        if again > self.max_restarts:
            self._say(
                f"worker {child.rank} {child.how(code)} and was started again "
                f"{child.restarts} times already; ending all workers. The stores keep what "
                f"was saved: {_RESUME}"
            )
            return False
        self._say(
            f"worker {child.rank} (process {child.process.pid}) {child.how(code)}; started "
            f"again ({again} of {self.max_restarts})"
        )
        self._start(child.rank, folder, after=child).restarts = again
        return True

    def _start(self, rank: int, folder: Path, *, after: _Child | None = None) -> _Child:
        self._started = time.monotonic()
        signs = SignsOfLife(folder / f"worker-{rank}")
        process, output = self._take_process(rank, signs.path)
        child = _Child(rank, process, signs, output=output)
        if after is not None:
            child.vain_starts, child.vain_code = after.vain_starts, after.vain_code
            child.failure, child.failures = after.failure, after.failures
        self._children[rank] = child
        return child

    def _take_process(
        self, rank: int, alive_file: Path
    ) -> tuple[subprocess.Popen[bytes], Output | None]:
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.output is not None:
                spare.output.rank = rank
            if spare.become(rank, alive_file):
                return spare.process, spare.output
            spare.process.wait()
        return self._open({RANK: str(rank), ALIVE: str(alive_file)}, rank)

    def _open(
        self, environment: Mapping[str, str], rank: int | None, pass_fds: Sequence[int] = ()
    ) -> tuple[subprocess.Popen[bytes], Output | None]:
        self._keep_secret()
        output = Output(rank, self.log_dir) if self.prefixes else None
        ends = [None, None] if output is None else output.ends
        process = subprocess.Popen(
            list(self.command),
            env={**self._environment, **environment},
            stdout=ends[0],
            stderr=ends[1],
            pass_fds=pass_fds,
            preexec_fn=partial(end_with, os.getpid()),
        )
        if output is not None:
            output.started()
        return process, output

    def _start_spares(self) -> None:
        """Start missing spares; report and drop those that ended by themselves."""
        for spare in [spare for spare in self._waiting if spare.process.poll() is not None]:
            self._waiting.remove(spare)
            spare.end()
            self._spares_lost += 1
            self._say(f"a spare worker {_how(spare.process.returncode)}")
        if time.monotonic() < self._started + self.spare_delay_seconds:
            return
        while len(self._waiting) < self.spares and self._spares_lost <= self.max_restarts:
            reading, writing = os.pipe()
            process, output = self._open({SPARE: str(reading)}, None, [reading])
            os.close(reading)
            self._waiting.append(_Spare(process, writing, output))

    def _make_environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of all workers; host the rendezvous if no other process does."""
        environment = {
            # A killed worker's connections close after its memory is freed, which in pages of 4 KB
            # takes 0.1 s per GB: large tensors are in huge pages unless the user says otherwise.
            _HUGE_PAGES: "1",
            # Threads of more than a machine's cores wait for each other in busy loops.
            _THREADS: str(max(1, len(os.sched_getaffinity(0)) // self.num_workers)),
            # Lines of a pipe appear when they are written.
            **({_UNBUFFERED: "1"} if self.prefixes else {}),
            **os.environ,
            WORLD_SIZE: str(self.num_workers if self.world_size is None else self.world_size),
            LOCAL_WORLD_SIZE: str(self.num_workers),
            JOB: self.job,
        }
        self._keep_secret = hand_over(environment, folder)
        if self.rendezvous is not None:
            return {**environment, RENDEZVOUS: self.rendezvous}
        self._host, self._host_started = HostProcess(environment), time.monotonic()
        return {**environment, RENDEZVOUS: self._host.place, ADDRESS: LOOPBACK}

    def _see_to_host(self) -> bool:
        """Start the rendezvous' host again if it died; False if that would not help."""
        if self._host is None or (code := self._host.process.poll()) is None:
            return True
        if time.monotonic() > self._host_started + _HEALTHY_SECONDS:
            self._hosts_lost = 0
        self._hosts_lost, self._host_started = self._hosts_lost + 1, time.monotonic()
        if self._hosts_lost > self.max_restarts:
            self._say(
                f"the rendezvous host {_how(code)} and was started again {self.max_restarts} times "
                f"already; ending all workers. The stores keep what was saved: {_RESUME}"
            )
            return False
        self._say(f"the rendezvous host {_how(code)}; started again")
        self._keep_secret()
        self._host.restart()
        return True

    def _kill_if_hung(self, child: _Child) -> None:
        if self.hang_seconds is None:
            return
        silent_seconds = child.signs.silent_seconds()
        if silent_seconds > self.hang_seconds:
            self._say(
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
        if self._signal == signal.SIGINT:
            # Ctrl-C reached them as well; a second interrupt would meet them while they clean up.
            _wait_for(processes, _INTERRUPT_SECONDS)
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)  # one that is stopped ends, too
        for process in _wait_for(processes, _END_SECONDS):
            process.kill()
            process.wait()
        outputs = [child.output for child in self._children.values()]
        for output in [*outputs, *(spare.output for spare in self._waiting)]:
            if output is not None:
                output.finish(_DRAIN_SECONDS)
        if self._host is not None:
            self._host.end()

    def _say(self, text: str) -> None:
        """Report an event; a job does not end because nobody reads that any more."""
        with suppress(OSError, ValueError):
            self.report(text)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _wait_for_an_end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when one of them ends, or after a moment."""
    with ExitStack() as opened:
        ends = select.poll()
        try:
            for process in processes:
                descriptor = os.pidfd_open(process.pid)
                opened.callback(os.close, descriptor)
                ends.register(descriptor, select.POLLIN)
        except (AttributeError, OSError):  # systems and kernels without it
            time.sleep(_POLL_SECONDS)
        else:
            ends.poll(1000 * _POLL_SECONDS)


def _wait_for(
    processes: Sequence[subprocess.Popen[bytes]], seconds: float
) -> list[subprocess.Popen[bytes]]:
    """Wait until all have ended, for so long at most; returns those that have not."""
    deadline = time.monotonic() + seconds
    while (left := [p for p in processes if p.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _memory_kills() -> int:
    """Return how many processes the kernel has killed here for want of memory."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split("\n")[0])
    return 0


def _how(code: int) -> str:
    if code == EXIT_CODE:
        return "left after SIGTERM, or of its own will"
    if code == 0:
        return "ended before its part of the job was done"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
