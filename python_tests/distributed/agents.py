"""Agents of torchrun itself, as users start them, or of `cpr launch`; workers are FateJobs."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from python_tests.distributed.cluster import ROOT, Watched, free_port
from python_tests.distributed.journal import Settings

WORKER = Path(__file__).parent / "hosts/agent_worker.py"
LAUNCH = [sys.executable, "-m", "cpr_ext.wings.cli", "launch"]


def metadata(folder):
    """A folder for PYTHONPATH that has this tree's entry points, installed or not."""
    text = (ROOT / "pyproject.toml").read_text()
    [handlers] = re.findall(r'entry-points."torchrun.handlers"\]\n(.*)\n', text)
    info = folder / "metadata" / "cpr_ext-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpr_ext\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\n" + handlers.replace('"', ""))
    return info.parent


def running(text):
    """The processes whose command has this text, and that are no corpses."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_corpse = path.with_name("stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if text in path.read_text() and not is_corpse:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


class Started(Watched):
    """Processes of one job, each with a log, in a folder that its workers know."""

    def __init__(self, folder, **settings):
        folder.mkdir(exist_ok=True)
        known = {"recovery": "exact", "world_size": 2, "num_steps": 300, "step_seconds": 0.1}
        known["job"] = ("python_tests.distributed.hosts.fate_job", "FateJob")
        known |= {"digests": False, **settings}
        options = {"group_size": known["world_size"], "model": "plain", "hands": [], "loop": "own"}
        self.settings = Settings(str(folder), 0, **{"options": options, **known})
        (folder / "settings").write_text(json.dumps(asdict(self.settings)))
        path = os.pathsep.join(map(str, (metadata(folder), ROOT)))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CPR_")}
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.processes = []

    def run(self, *command):
        with self.log(len(self.processes)).open("w") as log:
            process = subprocess.Popen(
                list(map(str, command)), cwd=self.folder, env=self.environment, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, number):
        return self.folder / f"agent-{number}.log"

    def logs(self):
        return "\n".join(self.log(n).read_text()[-6000:] for n in range(len(self.processes)))

    diagnosis = logs

    def order(self, rank, what):
        """Have a worker obey as its next step begins; its process number, and its agent's."""
        before = len(self.events(rank, "obeys"))
        order(self.folder, rank, f"begin {what}")
        self.wait_until(lambda: len(self.events(rank, "obeys")) > before)
        event = self.events(rank, "obeys")[-1]
        return event["pid"], event["parent"]

    def agent_of(self, rank):
        """The number of the agent whose worker has this rank; None: nobody trains with it yet."""
        began = self.events(rank, "began")
        pids = [process.pid for process in self.processes]
        return pids.index(began[-1]["parent"]) if began else None

    def hurry(self):
        (self.folder / "hurry").touch()

    def codes(self):
        for process in self.processes:
            self.wait_until(lambda process=process: process.poll() is not None)
        return [process.returncode for process in self.processes]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # workers end with their agents
            process.wait()


def order(folder, rank, what):
    """Have a worker do something at a point, ``POINT WHAT [SECONDS]``; the file that says so."""
    new = folder / f"command-{rank}.new"
    new.write_text(what)
    return new.replace(folder / f"command-{rank}")


class Agents(Started):
    """Those of torchrun, of so many nodes."""

    def __init__(
        self, folder, nodes, *, nproc=1, endpoint=None, num_restarts=3, command=(WORKER,), **known
    ):
        super().__init__(folder, **known)
        (folder / "secret").write_text("of-the-tests-of-agents-and-no-other-job")
        self.environment["CPR_JOB_SECRET_FILE"] = str(folder / "secret")
        self._arguments = [
            f"--nnodes={nodes}", f"--nproc-per-node={nproc}", f"--max-restarts={num_restarts}",
            "--rdzv-backend=cpr", f"--rdzv-endpoint={endpoint or f'localhost:{free_port()}'}",
            "--rdzv-id=a-job", "--monitor-interval=0.1", *command, folder,
        ]  # fmt: skip

    def start(self, *, prefix=(), **conf):
        """Start an agent; ``conf`` is for ``--rdzv-conf``."""
        extra = [f"--rdzv-conf={','.join(f'{k}={v}' for k, v in conf.items())}"] if conf else []
        torchrun = (sys.executable, "-m", "torch.distributed.run")
        return self.run(*prefix, *torchrun, *extra, *self._arguments)


@contextmanager
def closing(job):
    try:
        yield job
    finally:
        job.close()
