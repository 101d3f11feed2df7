"""A healthy job on a busy machine: nobody is lost.

    python -m python_tests.distributed.hosts.healthy [SECONDS] [SEED]

Three nodes and a standby, each with an agent of torchrun in a namespace of its own, beside twenty
busy loops. By chance a worker holds its interpreter for 30 s, or for parts of a second many times,
takes 45 s for a step, or all take 60 s for one; and an agent is stopped for 20 s. Whatever ends,
meets again or changes its place is a false death. Time-outs are the library's own.
"""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from cpr_ext.distributed import Parity, Worker
from python_tests.distributed.agents import Agents
from python_tests.distributed.namespaces import Network

WORKERS, BUSY_LOOPS = 3, 20
ENDLESS = 10**9
#: How long a worker sleeps in a step, and whether it holds the interpreter meanwhile.
DELAYS = {"a GIL held for 30 s": (30, True), "a step of 45 s": (45, False)}


def build(group):
    torch.manual_seed(0)
    head = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
    table = nn.EmbeddingBag(2000, 8, sparse=True)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (table, head)]
    return nn.ModuleDict({"table": table, "head": head}), optimizers


def work(folder):
    """Train, and note each event but steps."""

    def observe(event):
        if event.kind != "step":
            with (folder / f"notes-{os.getpid()}").open("a") as notes:
                print(event.kind, "at step", event.step, file=notes)

    worker = Worker.from_environment(
        folder / "store", recovery="exact", parity=Parity(group_size=WORKERS), observe=observe
    )

    def train_step(job, step):
        draw = torch.Generator().manual_seed(1000 * step + job.rank)
        rows = torch.randint(0, 2000, (32, 4), generator=draw)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        job.model["head"](job.model["table"](rows)).square().mean().backward()
        for optimizer in job.optimizers:
            optimizer.step()
        (folder / f"step-{job.rank}").write_text(str(step))
        command = folder / f"command-{job.rank}"
        if command.exists():
            seconds, holds = json.loads(command.read_text())
            command.unlink()
            library = ctypes.PyDLL(None) if holds else ctypes.CDLL(None)  # the first keeps the GIL
            library.usleep(int(1e6 * seconds)) if seconds < 1 else library.sleep(int(seconds))
        time.sleep(0.02)
        return len(rows) * job.world_size

    worker.run(build, train_step, num_steps=ENDLESS)


class Watched:
    """The job, and what is done to it."""

    def __init__(self, folder, network, seed):
        self.folder, self.chance, self.counts = folder, random.Random(seed), Counter()
        endpoint = f"{network.address(0)}:29400"
        nodes = f"{WORKERS}:{WORKERS + 1}"
        script = ("-m", "python_tests.distributed.hosts.healthy", "--work", folder)
        self.agents = Agents(folder, nodes, *script, endpoint=endpoint, num_restarts=100)
        for host in range(WORKERS + 1):
            self.agents.start(prefix=network.prefix(host))
        self.agents.wait_until(lambda: len(self.steps()) == WORKERS and min(self.steps()) > 20)

    def steps(self):
        found = (self.folder / f"step-{rank}" for rank in range(WORKERS))
        return [int(path.read_text() or 0) for path in found if path.exists()]

    def notes(self):
        """The notes of each process that worked."""
        return {path.name: path.read_text() for path in sorted(self.folder.glob("notes-*"))}

    def faults(self):
        """What a healthy job does not have."""
        notes = self.notes()
        found = [f"{len(notes)} processes worked: {notes}"] if len(notes) != WORKERS else []
        for name, text in notes.items():
            if [line.split()[0] for line in text.splitlines()] != ["joined", "recovered"]:
                found.append(f"{name}: {text}")
        codes = [agent.poll() for agent in self.agents.processes]
        return found + [f"an agent ended with {code}" for code in codes if code is not None]

    def order(self, seconds, holds, ranks):
        for rank in ranks:
            path = self.folder / f"command-{rank}"
            path.with_suffix(".new").write_text(json.dumps([seconds, holds]))
            path.with_suffix(".new").rename(path)

    def disturb(self):
        """Do one thing, and wait until the job trains again."""
        what = self.chance.choice([*DELAYS, "all take 60 s", "an agent stops", "short holds"])
        self.counts[what] += 1
        rank = [self.chance.randrange(WORKERS)]
        if what in DELAYS:
            self.order(*DELAYS[what], rank)
        elif what == "all take 60 s":
            self.order(60, False, range(WORKERS))
        elif what == "short holds":
            for _ in range(20):
                self.order(self.chance.uniform(0.1, 0.9), True, [self.chance.randrange(WORKERS)])
                time.sleep(0.5)
        else:
            agent = self.chance.choice(self.agents.processes)
            os.kill(agent.pid, signal.SIGSTOP)
            time.sleep(20)
            os.kill(agent.pid, signal.SIGCONT)
        aim = max(self.steps()) + 20
        self.agents.wait_until(lambda: min(self.steps()) >= aim)


def main(seconds=3600.0, seed=1):
    began = time.monotonic()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    with tempfile.TemporaryDirectory(prefix="cpr-healthy-") as folder:
        network, job = Network(WORKERS + 1), None
        try:
            job = Watched(Path(folder), network, seed)
            while time.monotonic() < began + seconds and not (faults := job.faults()):
                job.disturb()
            faults = job.faults()
            print(f"{min(job.steps())} steps in {time.monotonic() - began:.0f} s at load")
            print(f"{os.getloadavg()[0]:.0f}; {dict(job.counts)}: {len(faults)} false deaths")
            for each in faults:
                print(each[:2000])
        finally:
            if job is not None:
                job.agents.close()
            network.close()
            for process in busy:
                process.kill()
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    else:
        sys.exit(main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3])))
