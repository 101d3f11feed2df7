"""A job of several real processes, to be killed, stopped and started again by a test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from python_tests.distributed.journal import Settings, journal_of

ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    "collective_seconds": 8.0, "join_seconds": 60.0, "heartbeat_seconds": 0.5,
    "identity_seconds": 20.0,
}  # fmt: skip
# Nobody is taken for lost on a busy machine; a wait for the end of a time-out fails the test.
PATIENT, WAIT_SECONDS = {"collective_seconds": 900.0, "join_seconds": 900.0}, 500


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

    def end(self, pid):
        """Kill it, if it runs still."""
        if self.ask("wait", pid, 0) is None:
            os.kill(pid, signal.SIGKILL)
            self.ask("wait", pid, 10)

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Watched:
    """What is seen of a job, by its ``settings``."""

    @property
    def folder(self):
        return Path(self.settings.directory)

    @property
    def ranks(self):
        return range(self.settings.world_size)

    def events(self, rank, kind=None):
        found = journal_of(self.settings, rank).read()
        return [event for event in found if kind in (None, event["event"])]

    def recovered(self, rank):
        return self.events(rank, "recovered")

    def recoveries(self, rank=0):
        """What each process of this rank was told, one after the other; the first is the start."""
        return [event["recovery"] for event in self.recovered(rank)]

    def lost(self, rank=0):
        return [recovery["lost"] for recovery in self.recoveries(rank)]

    def finals(self):
        """What each worker's model held when the job was done."""
        files = sorted(self.folder.glob("final-*.pt"))
        return [torch.load(file, weights_only=False) for file in files]

    def wait_until(self, condition, seconds=200):
        """In far more time than anything takes here."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.diagnosis()
            time.sleep(0.02)
        return found


class Cluster(Watched):
    """Workers of one job, and the process that hosts their rendezvous.

    Args:
        nurseries: of these the ranks are forked in turn.
        meeting: forks the rendezvous' host; by default the first of them does.
        serve: module and function that the host runs.
    """

    def __init__(self, nurseries, directory, *, meeting=None, serve=None, **settings):
        directory.mkdir(parents=True, exist_ok=True)
        time_outs = {**QUICK, **settings.pop("time_outs", {})}
        self.settings = Settings(str(directory), port=free_port(), time_outs=time_outs, **settings)
        self.stores = directory / self.settings.stores
        self._nurseries, self._meeting = nurseries, meeting or nurseries[0]
        self._serve = serve or ("python_tests.distributed.meeting_place", "serve")
        self._nursery_of, self.pids, self._lives = {}, {}, {}
        self.start_host(is_first=True)

    def start(self, *ranks, **changed):
        """Start these workers, or all; again if they were started before."""
        for rank in ranks or self.ranks:
            self.pids[rank] = self.start_another(rank, **changed)

    def start_another(self, rank, nursery=None, **changed):
        """Start a process of this rank and return it; ``pids`` has the one before still."""
        life = self._lives[rank] = self._lives.get(rank, 0) + 1
        settings = asdict(replace(self.settings, **changed))
        nursery = nursery or self._nurseries[rank % len(self._nurseries)]
        command = ("call", "python_tests.distributed.job", "run_worker", settings, rank, life)
        return self._fork(nursery, *command)

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
        """Also wait for their ends, if they end by it."""
        for rank in ranks:
            os.kill(self.pids[rank], with_signal)
        if with_signal == signal.SIGKILL:
            for rank in ranks:
                code = self.wait_for_exit(self.pids[rank], 30)
                assert code == -signal.SIGKILL, f"worker {rank}: {code}\n{self.diagnosis()}"

    def kill_host(self, with_signal=signal.SIGKILL):
        os.kill(self._host, with_signal)
        if with_signal == signal.SIGKILL:
            self.wait_for_exit(self._host, 5)

    def start_host(self, *, is_first=False):
        place, log = (self.settings.host, self.settings.port), str(self.folder / "log-host")
        given = (*place, self.settings.secret, log, is_first)
        self._host = self._fork(self._meeting, "call", *self._serve, *given)

    def exit_code(self, rank, seconds=100):
        return self.wait_for_exit(self.pids[rank], seconds)

    def exit_codes(self, seconds=150):
        deadline = time.monotonic() + seconds
        return {
            rank: self.wait_for_exit(pid, max(0, deadline - time.monotonic()))
            for rank, pid in self.pids.items()
        }

    def finish(self, seconds=150):
        codes = self.exit_codes(seconds)
        assert codes == dict.fromkeys(self.ranks, 0), f"{codes}\n{self.diagnosis()}"
        for rank in self.ranks:
            assert self.events(rank)[-1]["step"] in (self.settings.num_steps, None)

    def run(self):
        """Run to the end; start again who kills itself, as often as it is to."""
        self.start()
        self.restart_the_dead()
        self.finish(WAIT_SECONDS)

    def restart_the_dead(self):
        """Until all have died that are to."""
        planned = {rank: len(deaths) for rank, deaths in self.settings.deaths.items()}
        deadline = time.monotonic() + WAIT_SECONDS
        while any(planned.values()):
            for rank in self.ranks:
                if (code := self.exit_code(rank, 0)) is None:
                    continue
                is_planned = planned.get(rank, 0) > 0
                assert (code, is_planned) == (-signal.SIGKILL, True), self.logs()
                planned[rank] -= 1
                self.start(rank)
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def states(self):
        """By rank and step: rows, their state, replicas; a step that was trained again is the same.

        Of a worker that lacks rows still, nothing is known.
        """
        found = {}
        for rank in self.ranks:
            for event in self.events(rank, "step"):
                if "tables" in event:
                    known = (event["tables"], event["replicas"])
                    assert found.setdefault((rank, event["step"]), known) == known, event["step"]
        return found

    def wait_for_step(self, step, *ranks):
        """Until these workers, or all, have trained so many steps in their present lives."""
        for rank in ranks or self.ranks:
            self.wait_until(lambda rank=rank: self.step(rank) >= step, WAIT_SECONDS)

    def wait_for_loss(self, *ranks):
        """Until these workers, or all, have noticed that one is lost, and wait for it."""
        for rank in ranks or self.ranks:
            self.wait_until(lambda rank=rank: self.events(rank)[-1]["event"] == "peer_lost")

    def wait_for_recovery(self, number, *ranks):
        """Until these workers, or all, have recovered so often; the start counts."""
        for rank in ranks or self.ranks:
            self.wait_until(lambda rank=rank: len(self.recovered(rank)) >= number)

    def step(self, rank):
        steps = [e["step"] for e in self.events(rank, "step") if e["pid"] == self.pids[rank]]
        return max(steps, default=-1)

    def newest_step(self):
        return max((e["step"] for r in self.ranks for e in self.events(r, "step")), default=0)

    def diagnosis(self):
        """Have each worker that still runs write where it is, and return all logs."""
        running = [pid for pid in self.pids.values() if self.wait_for_exit(pid, 0) is None]
        for pid in running:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5 if running else 0)
        return self.logs()

    def logs(self):
        logs = sorted(self.folder.glob("log-*"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def close(self):
        for pid, nursery in self._nursery_of.items():
            nursery.end(pid)


@contextmanager
def clusters(nursery, folder):
    """Makes clusters, in folders by their names, and ends them."""
    made = []

    def make(name="job", **settings):
        made.append(Cluster([nursery], folder / name, **settings))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
