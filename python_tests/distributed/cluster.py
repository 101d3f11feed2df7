"""A job of several real processes, to be killed, stopped and started again by a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from python_tests.distributed.sharded_job import Settings, journal_of

ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    "collective_seconds": 8.0,
    "join_seconds": 60.0,
    "heartbeat_seconds": 0.5,
    "identity_seconds": 20.0,
}


class Nursery:
    """A process that forks others; see ``nursery.py``."""

    def __init__(self, prefix=()):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "python_tests.distributed.nursery"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as `cpr launch` divides the cores
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery died"
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Cluster:
    """Workers of one job, and the process that hosts their rendezvous.

    Args:
        nurseries: of these the ranks are forked in turn; the first forks the rendezvous' host.
    """

    def __init__(self, nurseries, directory, **settings):
        directory.mkdir(parents=True, exist_ok=True)
        time_outs = {**QUICK, **settings.pop("time_outs", {})}
        self.settings = Settings(str(directory), port=free_port(), time_outs=time_outs, **settings)
        self._nurseries = nurseries
        self._nursery_of, self.pids, self._lives = {}, {}, {}
        self._host_log = directory / "log-host"
        self.start_host(is_first=True)

    @property
    def ranks(self):
        return range(self.settings.world_size)

    def start(self, *ranks, **changed):
        """Start these workers, or all; again if they were started before."""
        for rank in ranks or self.ranks:
            life = self._lives[rank] = self._lives.get(rank, 0) + 1
            settings = asdict(replace(self.settings, **changed))
            nursery = self._nurseries[rank % len(self._nurseries)]
            self.pids[rank] = self._fork(nursery, "worker", settings, rank, life)

    def start_another(self, rank, nursery=None, **changed):
        """Start a second process of this rank and return it; the first stays in ``pids``."""
        first, used = self.pids[rank], self._nurseries
        self._nurseries = [nursery] * len(used) if nursery else used
        self.start(rank, **changed)
        self._nurseries = used
        second, self.pids[rank] = self.pids[rank], first
        return second

    def _fork(self, nursery, *command):
        pid = nursery.ask(*command)
        self._nursery_of[pid] = nursery
        return pid

    def life(self, rank):
        """The number of the newest process of this rank."""
        return self._lives[rank]

    def wait_for_exit(self, pid, seconds):
        return self._nursery_of[pid].ask("wait", pid, seconds)

    def kill(self, *ranks, with_signal=signal.SIGKILL):
        for rank in ranks:
            os.kill(self.pids[rank], with_signal)

    def kill_host(self, with_signal=signal.SIGKILL):
        os.kill(self._host, with_signal)
        if with_signal == signal.SIGKILL:
            self.wait_for_exit(self._host, 5)

    serve = ("python_tests.distributed.meeting_place", "serve")

    def start_host(self, *, is_first=False):
        self._host = self._fork(
            self._nurseries[0],
            *("call", *self.serve),
            *(
                self.settings.host,
                self.settings.port,
                self.settings.secret,
                str(self._host_log),
                is_first,
            ),
        )

    def wait_for_death(self, *ranks, seconds=30):
        for rank in ranks:
            code = self.wait_for_exit(self.pids[rank], seconds)
            assert code == -signal.SIGKILL, f"worker {rank}: {code}\n{self.diagnosis()}"

    def exit_code(self, rank, seconds=100):
        return self.wait_for_exit(self.pids[rank], seconds)

    def exit_codes(self, seconds=150):
        deadline = time.monotonic() + seconds
        codes = {}
        for rank, pid in self.pids.items():
            codes[rank] = self.wait_for_exit(pid, max(0, deadline - time.monotonic()))
        return codes

    def finish(self, seconds=150):
        codes = self.exit_codes(seconds)
        assert codes == dict.fromkeys(self.ranks, 0), f"{codes}\n{self.diagnosis()}"
        for rank in self.ranks:
            assert self.events(rank)[-1]["step"] in (self.settings.num_steps, None)

    def events(self, rank, kind=None):
        found = journal_of(self.settings, rank).read()
        return [event for event in found if kind in (None, event["event"])]

    def recoveries(self, rank):
        return self.events(rank, "recovered")

    def wait_until(self, condition, seconds=100):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.diagnosis()
            time.sleep(0.02)

    def wait_for_step(self, step, *ranks):
        """Until these workers, or all, have trained so many steps in their present lives."""
        for rank in ranks or self.ranks:
            self.wait_until(lambda rank=rank: self.step(rank) >= step)

    def step(self, rank):
        steps = [e["step"] for e in self.events(rank, "step") if e["pid"] == self.pids[rank]]
        return max(steps, default=-1)

    def diagnosis(self):
        """Have each worker that still runs write where it is, and return all logs."""
        running = [pid for pid in self.pids.values() if self.wait_for_exit(pid, 0) is None]
        for pid in running:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5 if running else 0)
        return self.logs()

    def logs(self):
        logs = sorted(Path(self.settings.directory).glob("log-*"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def close(self):
        for pid in self._nursery_of:
            if self.wait_for_exit(pid, 0) is None:
                os.kill(pid, signal.SIGKILL)
                self.wait_for_exit(pid, 10)
