"""A healthy job on a busy machine: nobody is lost.

    python -m python_tests.distributed.hosts.healthy [SECONDS] [SEED]

Three nodes and a standby, each with an agent of torchrun in a namespace of its own, beside twenty
busy loops. By chance a worker holds its interpreter for 30 s, or for parts of a second many times,
takes 45 s for a step, evaluates for 90 s, which is longer than ``collective_seconds``, or all take
60 s for a step; and an agent is stopped for 20 s. Whatever ends, meets again or changes its place
is a false death. Time-outs are the library's own.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from python_tests.distributed.agents import Agents, order
from python_tests.distributed.namespaces import Network

WORKERS, BUSY_LOOPS = 3, 20
STEPS = 200_000  # hours
#: What a worker does in a step; it holds the interpreter meanwhile, or not.
DELAYS = {
    "a GIL held for 30 s": "hold 30", "a step of 45 s": "sleep 45", "an evaluation": "sleep 90",
}  # fmt: skip


class Watched:
    """The job, and what is done to it."""

    def __init__(self, folder, network, seed):
        self.folder, self.chance, self.counts = folder, random.Random(seed), Counter()
        endpoint = f"{network.address(0)}:29400"
        nodes, known = f"{WORKERS}:{WORKERS + 1}", {"num_steps": STEPS, "step_seconds": 0.02}
        self.agents = Agents(
            folder, nodes, endpoint=endpoint, num_restarts=100, world_size=WORKERS, **known
        )
        for host in range(WORKERS + 1):
            self.agents.start(prefix=network.prefix(host))
        self.agents.wait_until(lambda: min(self.steps()) > 20)

    def steps(self):
        return [len(self.agents.events(rank, "step")) for rank in range(WORKERS)]

    def faults(self):
        """What a healthy job does not have."""
        found = []
        for rank in range(WORKERS):
            for kind in ("began", "joined", "recovered"):
                events = self.agents.events(rank, kind)
                found += [f"worker {rank}: {events}"] if len(events) != 1 else []
        codes = [agent.poll() for agent in self.agents.processes]
        return found + [f"an agent ended with {code}" for code in codes if code is not None]

    def order(self, what, *ranks):
        for rank in ranks:
            order(self.folder, rank, f"begin {what}")

    def disturb(self):
        """Do one thing, and wait until the job trains again."""
        what = self.chance.choice([*DELAYS, "all take 60 s", "an agent stops", "short holds"])
        self.counts[what] += 1
        if what in DELAYS:
            self.order(DELAYS[what], self.chance.randrange(WORKERS))
        elif what == "all take 60 s":
            self.order("sleep 60", *range(WORKERS))
        elif what == "short holds":
            for _ in range(20):
                seconds, rank = self.chance.uniform(0.1, 0.9), self.chance.randrange(WORKERS)
                self.order(f"hold {seconds}", rank)
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
    sys.exit(main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3])))
