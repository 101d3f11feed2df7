"""`cpr launch`: agents of torchrun, forked by one process; a spare takes the place of the dead."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("agent_job.py")
WAIT_SECONDS = 100


class Launched:
    """A launcher whose workers run ``command``."""

    def __init__(self, folder, *command, nproc=2, prefix=(), options=()):
        self.folder, self._log = folder, folder / "launcher.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "cpr_ext.wings.cli", "launch", "--nproc",
                 str(nproc), *options, *map(str, command)],
                cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def said(self):
        return self._log.read_text()

    def wait_until(self, is_so):
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := is_so()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)
        return found

    def waiting(self, rank):
        """The process number of a worker that waits for its end."""
        path = self.folder / f"waits-{rank}"
        self.wait_until(path.exists)
        return int(path.read_text().split()[0])

    def code(self):
        self.wait_until(lambda: self.process.poll() is not None)
        return self.process.returncode


@pytest.fixture
def launched(tmp_path):
    made = []

    def launch(*command, **options):
        made.append(Launched(tmp_path, *command, **options))
        return made[-1]

    yield launch
    for job in made:
        job.process.kill()
        job.process.wait()


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


def test_a_spare_takes_the_place_of_a_killed_worker_and_no_bit_changes(tmp_path, launched):
    finals = []
    for name, fate in (("whole", None), ("killed", "12 wait")):
        folder = tmp_path / name
        folder.mkdir()
        if fate:
            (folder / "fate-1").write_text(fate)
        job = launched(JOB, folder)
        if fate:
            job.folder = folder
            os.kill(job.waiting(1), signal.SIGKILL)
        assert job.code() == 0, job.said()
        finals.append([torch.load(folder / f"final-{rank}.pt") for rank in range(2)])
    whole, killed = finals
    assert killed[0]["lost"] == [(0, 1), (1,)]
    for final, wanted in zip(killed, whole, strict=True):
        for key, value in wanted["model"].items():
            assert torch.equal(final["model"][key], value), key
    assert running(str(tmp_path)) == []


def test_the_spare_was_there_and_its_predecessors_agent_stands_by(tmp_path, launched):
    (tmp_path / "job.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from cpr_ext.distributed.rendezvous.standing_by import take_rank\n"
        "from cpr_ext.distributed.rendezvous.rendezvous import Rendezvous\n"
        "from cpr_ext.distributed.identity.worker_identity import Identity, TimeOuts\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "(folder / f'imported-{os.getpid()}').touch()\n"
        "take_rank(60.0)\n"
        "with (folder / 'lives').open('a') as file:\n"
        "    print(os.getpid(), os.getppid(), *(os.environ[name] for name in ('RANK',\n"
        "        'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'THP_MEM_ALLOC_ENABLE')), file=file)\n"
        "assert 'CPR_JOB_SECRET' not in os.environ\n"
        "while len(list(folder.glob('imported-*'))) < 2:\n"
        "    time.sleep(0.01)\n"
        "if len((folder / 'lives').read_text().splitlines()) == 1:\n"
        "    time.sleep(0.3)\n"
        "    names = [path.name for path in folder.glob('imported-*')]\n"
        "    (folder / 'known').write_text(' '.join(names))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Rendezvous(Identity.from_environment(), TimeOuts()).say_over()\n"
    )
    job = launched(tmp_path / "job.py", tmp_path, ROOT, nproc=1)
    assert job.code() == 0, job.said()
    first, second = (line.split() for line in (tmp_path / "lives").read_text().splitlines())
    assert f"imported-{second[0]}" in (tmp_path / "known").read_text()
    assert first[1] != second[1]
    assert first[2:] == second[2:] == ["0", "0", "1", "1"]


def test_a_script_that_cannot_start_ends_the_job(tmp_path, launched):
    (tmp_path / "job.py").write_text("import no_such_module_at_all\n")
    job = launched(tmp_path / "job.py", options=("--max-restarts", "1"))
    assert job.code() == 1
    assert "no_such_module_at_all" in job.said()
    assert "ending all workers. The stores keep what was saved" in job.said()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_workers(tmp_path, launched, number):
    (tmp_path / "fate-1").write_text("3 wait")
    job = launched(JOB, tmp_path)
    job.waiting(1)
    job.process.send_signal(number)
    assert job.code() == 128 + number, job.said()
    job.wait_until(lambda: not running(str(tmp_path)))


def test_agents_and_workers_end_with_a_launcher_that_is_killed(tmp_path, launched):
    """Else they train on, and the same command finds their places taken."""
    (tmp_path / "fate-1").write_text("3 wait")
    job = launched(JOB, tmp_path)
    job.waiting(1)
    job.process.kill()
    job.wait_until(lambda: not running(str(tmp_path)))


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path, launched):
    (tmp_path / "fate-1").write_text("12 wait")
    job = launched(JOB, tmp_path, prefix=("nohup",))
    worker = job.waiting(1)
    os.killpg(job.process.pid, signal.SIGHUP)
    for agent in running("cpr_ext.wings.cli"):
        if os.getsid(agent) == job.process.pid:
            os.kill(agent, signal.SIGHUP)
    time.sleep(0.5)
    os.kill(worker, signal.SIGKILL)
    assert job.code() == 0, job.said()


STUCK = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[2])
from cpr_ext.distributed import TimeOuts, Worker
worker = Worker.from_environment(sys.argv[1], time_outs=TimeOuts(join_seconds=2.0))
if worker.identity.rank == 1:
    time.sleep(1000)
worker._rendezvous.join()
"""


def test_a_job_that_cannot_continue_is_not_started_again(tmp_path, launched):
    (tmp_path / "job.py").write_text(STUCK)
    job = launched(tmp_path / "job.py", tmp_path, ROOT)
    assert job.code() == 1
    assert "worker 0 waited 2 s at 127.0.0.1:" in job.said()
    assert job.said().count("Traceback") == 1
    assert not running(str(tmp_path))
