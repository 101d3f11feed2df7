"""`cpr launch`: agents of torchrun, forked by one process, and how they end."""

import os
import signal
import time

import pytest

from python_tests.distributed.agents import LAUNCH, Started, closing, running

SLEEPS = """
import os, pathlib, sys, time
from cpr_ext.distributed.rendezvous.standing_by import take_rank
take_rank(60.0)
pathlib.Path(sys.argv[1], f"runs-{os.getpid()}").touch()
time.sleep(1000)
"""
STUCK = """
import sys, time
import torch
from cpr_ext.distributed import TimeOuts, Worker
worker = Worker.from_environment(sys.argv[1], time_outs=TimeOuts(join_seconds=2.0))
if worker.identity.rank == 1:
    time.sleep(1000)
model = torch.nn.Embedding(4, 2)
worker.run(lambda group: (model, torch.optim.SGD(model.parameters())), None, num_steps=1)
"""


@pytest.fixture
def job(tmp_path):
    with closing(Started(tmp_path)) as job:
        yield job
    assert running(str(tmp_path)) == []


def launch(job, script, *options, prefix=()):
    (job.folder / "job.py").write_text(script)
    command = ("--nproc", 2, *options, job.folder / "job.py", job.folder)
    return job.run(*prefix, *LAUNCH, *command)


def test_a_script_that_cannot_start_ends_the_job(job):
    launch(job, "import no_such_module_at_all\n", "--max-restarts", 1)
    assert job.codes() == [1]
    assert "no_such_module_at_all" in job.logs()
    assert "ending all workers. The stores keep what was saved" in job.logs()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all_workers(job, number):
    """Else they train on, and the same command finds their places taken.

    A hangup that is ignored stays ignored.
    """
    process = launch(job, SLEEPS, prefix=("nohup",) if number == signal.SIGHUP else ())
    job.wait_until(lambda: len(list(job.folder.glob("runs-*"))) >= 2)
    if number == signal.SIGHUP:
        os.killpg(process.pid, signal.SIGHUP)
        for agent in running("cpr_ext.wings.cli"):
            if os.getsid(agent) == process.pid:
                os.kill(agent, signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        number = signal.SIGTERM
    process.send_signal(number)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert job.codes() == [expected], job.logs()
    job.wait_until(lambda: not running(str(job.folder)))


def test_a_job_that_cannot_continue_is_not_started_again(job):
    launch(job, STUCK)
    assert job.codes() == [1]
    assert "worker 0 waited 2 s at 127.0.0.1:" in job.logs()
    assert job.logs().count("Traceback") == 1
