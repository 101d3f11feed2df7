"""Agents of torchrun itself, as users start them."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from python_tests.distributed.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 200  # far more than anything takes here; a job that hangs ends the test


def metadata(folder):
    """A folder for PYTHONPATH that has this tree's entry points, installed or not."""
    text = (ROOT / "pyproject.toml").read_text()
    [handlers] = re.findall(r'entry-points."torchrun.handlers"\]\n(.*)\n', text)
    info = folder / "metadata" / "cpr_ext-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpr_ext\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\n" + handlers.replace('"', ""))
    return info.parent


class Agents:
    """Of one job; its workers run ``command``."""

    def __init__(self, folder, nodes, *command, nproc=1, endpoint=None, num_restarts=3):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "secret").write_text("of-the-tests-of-agents-and-no-other-job")
        self._arguments = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
            f"--nproc-per-node={nproc}", f"--max-restarts={num_restarts}", "--rdzv-backend=cpr",
            f"--rdzv-endpoint={endpoint or f'localhost:{free_port()}'}", "--rdzv-id=a-job",
            "--monitor-interval=0.1", *map(str, command),
        ]  # fmt: skip
        path = os.pathsep.join(map(str, (metadata(folder), ROOT)))
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CPR_")},
            "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
            "CPR_JOB_SECRET_FILE": str(folder / "secret"),
        }  # fmt: skip
        self.processes = []

    def start(self, *, prefix=(), **conf):
        """Start an agent; ``conf`` is for ``--rdzv-conf``."""
        extra = [f"--rdzv-conf={','.join(f'{k}={v}' for k, v in conf.items())}"] if conf else []
        log = self.log(len(self.processes)).open("w")
        command = [*prefix, *self._arguments[:3], *extra, *self._arguments[3:]]
        with log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, number):
        return self.folder / f"agent-{number}.log"

    def logs(self):
        return "\n".join(self.log(n).read_text()[-6000:] for n in range(len(self.processes)))

    def wait_until(self, is_so):
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := is_so()):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)
        return found

    def waiting(self, rank):
        """The process numbers of a worker that waits for its end, and of its agent."""
        path = self.folder / f"waits-{rank}"
        self.wait_until(path.exists)
        return tuple(map(int, path.read_text().split()))

    def agent_of(self, rank):
        """The number of the agent whose worker has this rank; None: nobody trains with it yet."""
        path = self.folder / f"trains-{rank}"
        parent = int(path.read_text().split()[1]) if path.exists() else None
        pids = [process.pid for process in self.processes]
        return pids.index(parent) if parent in pids else None

    def codes(self):
        for process in self.processes:
            self.wait_until(lambda process=process: process.poll() is not None)
        return [process.returncode for process in self.processes]

    def finals(self):
        return [torch.load(path) for path in sorted(self.folder.glob("final-*.pt"))]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # workers end with their agents
            process.wait()


@contextmanager
def agents(*arguments, **options):
    made = Agents(*arguments, **options)
    try:
        yield made
    finally:
        made.close()
