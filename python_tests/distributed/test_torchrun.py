"""``torchrun --rdzv-backend=cpr``: agents and workers die, others take over, no bit changes."""

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from python_tests.distributed.agents import ROOT, agents
from python_tests.distributed.cluster import free_port

JOB = Path(__file__).with_name("agent_job.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    @cache
    def finals_of(world_size):
        folder = tmp_path_factory.mktemp("undisturbed")
        with agents(folder, "1", JOB, folder, nproc=world_size) as job:
            job.start()
            assert job.codes() == [0], job.logs()
            finals = job.finals()
        assert [final["lost"] for final in finals] == [[everybody(world_size)]] * world_size
        return finals

    return finals_of


def everybody(world_size):
    """All are new at the begin, so all count as lost."""
    return tuple(range(world_size))


def assert_same_bits(finals, expected):
    for final, wanted in zip(finals, expected, strict=True):
        for name, value in wanted["model"].items():
            assert torch.equal(final["model"][name], value), name
        for own, other in zip(final["optimizers"], wanted["optimizers"], strict=True):
            assert torch.equal(own[0]["sum"], other[0]["sum"])


def test_a_killed_worker_is_started_again_by_its_agent_and_no_bit_changes(tmp_path, undisturbed):
    (tmp_path / "fate-1").write_text("12 kill")
    with agents(tmp_path, "2", JOB, tmp_path) as job:
        job.start()
        job.start()
        assert job.codes() == [0, 0], job.logs()
        assert not (tmp_path / "fate-1").exists()
        assert job.finals()[0]["lost"] == [everybody(2), (1,)]
        assert_same_bits(job.finals(), undisturbed(2))


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_standby_takes_over_from_an_agent_that_dies_with_its_workers(
    tmp_path, undisturbed, nproc
):
    (tmp_path / "fate-1").write_text("12 wait")
    with agents(tmp_path, "2:3", JOB, tmp_path, nproc=nproc) as job:
        for _ in range(3):
            job.start()
        worker, agent = job.waiting(1)
        os.kill(agent, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        assert sorted(job.codes()) == [-signal.SIGKILL, 0, 0], job.logs()
        lost = (1,) if nproc == 1 else (0, 1)
        survivor = job.finals()[0 if nproc == 1 else 2]
        assert survivor["lost"] == [everybody(2 * nproc), lost]
        assert_same_bits(job.finals(), undisturbed(2 * nproc))


def test_a_standby_takes_over_from_an_agent_that_is_asked_to_end(tmp_path, undisturbed):
    (tmp_path / "fate-1").write_text("12 wait")
    with agents(tmp_path, "2:3", JOB, tmp_path) as job:
        for _ in range(3):
            job.start()
        _, agent = job.waiting(1)
        os.kill(agent, signal.SIGTERM)
        codes = job.codes()
        assert sorted(code == 0 for code in codes) == [False, True, True], job.logs()
        assert job.finals()[0]["lost"] == [everybody(2), (1,)]
        assert_same_bits(job.finals(), undisturbed(2))


def test_a_job_whose_rendezvous_dies_with_an_agent_finds_another_host(tmp_path, undisturbed):
    """The first agent hosts it; what it started serves as long as somebody is connected."""
    (tmp_path / "fate-0").write_text("12 wait")
    with agents(tmp_path, "2:3", JOB, tmp_path) as job:
        for _ in range(3):
            job.start()
        worker, agent = job.waiting(0)
        [host] = {pid for pid in map(host_of, (p.pid for p in job.processes)) if pid}
        os.kill(host, signal.SIGKILL)
        os.kill(agent, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        assert sorted(job.codes()) == [-signal.SIGKILL, 0, 0], job.logs()
        assert_same_bits(job.finals(), undisturbed(2))


def host_of(agent):
    """The process that hosts the rendezvous, if this agent has started it."""
    children = Path(f"/proc/{agent}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if "rendezvous_host" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return None


def test_agents_that_say_different_numbers_of_nodes_are_refused(tmp_path):
    with agents(tmp_path, "2", JOB, tmp_path) as job:
        first = job.start()
        job._arguments[3] = "--nnodes=3"
        second = job.start()
        job.wait_until(lambda: first.poll() is not None or second.poll() is not None)
        said = r"an agent says that there are [23] nodes, others say [23]; give all the same"
        assert re.search(said, job.logs())


def commands_of_the_readme():
    section = (ROOT / "README.md").read_text().partition("## Many processes")[2]
    return re.findall(r"^\$ (.*)$", section.partition("\n## ")[0], re.MULTILINE)


def run_as_pasted(folder, lines):
    (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with agents(folder / "job", "1") as job:
        environment = {**job.environment, "PATH": path}
        del environment["CPR_JOB_SECRET_FILE"]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "step  350" in done.stdout, done.stderr


def test_the_commands_of_the_readme_start_a_job_with_a_standby(tmp_path):
    """Copied and pasted; the last one in three terminals, and with a free port."""
    first, second, torchrun = commands_of_the_readme()[:3]
    torchrun = torchrun.replace("29400", str(free_port()))
    waits = [f"wait ${{pids[{n}]}} || exit 1" for n in range(3)]
    starts = [f"{torchrun} & pids[{n}]=$!" for n in range(3)]
    run_as_pasted(tmp_path, [first, second, *starts, *waits])
