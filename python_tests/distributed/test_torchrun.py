"""``torchrun --rdzv-backend=cpr`` and `cpr launch`: who dies is replaced, and no bit changes."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from python_tests.distributed.agents import LAUNCH, WORKER, Agents, Started, closing, running
from python_tests.distributed.cluster import ROOT, free_port
from python_tests.distributed.namespaces import Network, or_skipped
from python_tests.helpers import assert_same

ALL = [0, 1]  # are new at the begin, so all count as lost


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with closing(Agents(tmp_path_factory.mktemp("undisturbed"), "1", nproc=2)) as job:
        job.hurry()
        job.start()
        assert job.codes() == [0], job.logs()
        assert job.lost(0) == [ALL]
        return job.finals()


def test_whoever_dies_is_replaced_and_no_bit_changes(tmp_path, undisturbed):
    """A worker, which its agent starts again; an agent that is asked to end; one that dies with its
    worker and the rendezvous: what an agent started serves as long as somebody is connected."""
    with closing(Agents(tmp_path, "2:4")) as job:
        first = job.start()
        host = job.wait_until(lambda: host_of(first.pid))
        job.start()
        job.order(1, "kill")
        job.wait_until(lambda: job.lost(0) == [ALL, [1]])
        assert len({event["parent"] for event in job.events(1, "began")}) == 1
        for _ in range(2):
            job.start()
        _, agent = job.order(1, "wait")
        os.kill(agent, signal.SIGTERM)
        job.wait_until(lambda: job.lost(0) == [ALL, [1], [1]])
        worker, other = job.order(0, "wait")
        for pid in (host, other, worker):
            os.kill(pid, signal.SIGKILL)
        job.wait_until(lambda: job.lost(0)[-1] == [0])
        job.hurry()
        codes = dict(zip((process.pid for process in job.processes), job.codes(), strict=True))
        assert codes.pop(other) == -signal.SIGKILL
        assert codes.pop(agent) != 0
        assert list(codes.values()) == [0, 0], job.logs()
        assert_same(job.finals(), undisturbed)


def host_of(agent):
    """The process that hosts the rendezvous, if this agent has started it."""
    children = Path(f"/proc/{agent}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        with suppress(OSError):  # it has ended
            if "rendezvous_host" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return None


def test_a_spare_of_the_launcher_takes_the_place_of_who_dies_and_each_death_says_why(
    tmp_path, undisturbed
):
    """Its predecessor's agent stands by."""
    deaths = {
        "kill": "SIGKILL", "raise": "ValueError: the test says so (step ", "_exit": "exit code 3",
        "leave": "left: by SIGTERM or Worker.leave()",
    }  # fmt: skip
    with closing(Started(tmp_path)) as job:
        job.run(*LAUNCH, "--nproc", 2, WORKER, tmp_path)
        job.wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 3)
        time.sleep(2)  # the rendezvous knows of all three
        for number, (what, why) in enumerate(deaths.items(), 1):
            job.order(1, what)
            job.wait_until(lambda n=number: job.lost(0) == [ALL, *[[1]] * n])
            assert f"worker 1 ended: {why}" in job.logs()
        # On a busy machine the spare may not wait yet as the first one dies.
        assert len({event["parent"] for event in job.events(1, "began")}) > 1
        seen = job.events(0, "recovered")[-1]["deaths"]
        assert seen == [[1, why.partition(":")[0], 1] for why in deaths.values()]
        job.hurry()
        assert job.codes() == [0], job.logs()
        assert_same(job.finals(), undisturbed)
        assert running(str(tmp_path)) == []


def test_a_node_is_adopted_by_another_machine_while_its_own_is_gone(tmp_path, undisturbed):
    with or_skipped():
        network = Network(2)
    endpoint = f"{network.address(0)}:29400"
    job = Agents(tmp_path, "2", endpoint=endpoint)

    def start(host, **conf):
        job.start(prefix=network.prefix(host), adopt_after=2, **conf)
        return len(job.processes) - 1

    try:
        start(0, node=0)
        vanishes = start(1, node=1)
        parked = start(0)
        job.wait_until(lambda: job.agent_of(1) == vanishes and job.lost(1))
        network.cut(1)
        job.wait_until(lambda: job.agent_of(1) == parked)
        job.wait_until(lambda: f"the loss of machine {network.address(0)}, which" in job.logs())
        network.mend(1)
        job.hurry()
        job.wait_until(lambda: len(job.finals()) == 2)
        assert job.lost(0) == [ALL, [1]], job.logs()
        assert_same(job.finals(), undisturbed)
        assert job.codes() == [0] * 3, job.logs()
    finally:
        job.close()
        network.close()


def test_the_commands_of_the_readme_start_a_job_with_a_standby(tmp_path):
    """Copied and pasted; the last one in three terminals, and with a free port."""
    section = (ROOT / "README.md").read_text().partition("## Many processes")[2]
    commands = re.findall(r"^\$ (.*)$", section.partition("\n## ")[0], re.MULTILINE)
    first, second, torchrun = commands[:3]
    torchrun = torchrun.replace("29400", str(free_port()))
    waits = [f"wait ${{pids[{n}]}} || exit 1" for n in range(3)]
    starts = [f"{torchrun} & pids[{n}]=$!" for n in range(3)]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**Started(tmp_path / "job").environment, "PATH": path}
    done = subprocess.run(
        ["bash", "-c", "\n".join([first, second, *starts, *waits])],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step  350" in done.stdout, done.stderr
