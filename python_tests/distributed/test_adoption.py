"""Machines vanish and return: another machine has a node meanwhile, and no bit changes."""

import pytest
import torch

from python_tests.distributed.agent_job import __file__ as JOB
from python_tests.distributed.agents import agents
from python_tests.distributed.namespaces import Network, or_skipped

STEPS = 500  # 100 s of training, in which all of it happens, however busy this machine is
ADOPT_SECONDS = 2


@pytest.fixture
def network():
    with or_skipped():
        found = Network(3)
    yield found
    found.close()


@pytest.fixture
def undisturbed(tmp_path):
    folder = tmp_path / "undisturbed"
    with agents(folder, "1", JOB, folder, STEPS, nproc=2) as job:
        (folder / "hurry").touch()
        job.start()
        assert job.codes() == [0], job.logs()
        return job.finals()


def test_a_node_is_adopted_and_moves_to_a_machine_that_comes(network, tmp_path, undisturbed):
    folder = tmp_path / "job"
    endpoint = f"{network.address(0)}:29400"
    with agents(folder, "2", JOB, folder, STEPS, endpoint=endpoint) as job:

        def start(host, **conf):
            job.start(prefix=network.prefix(host), adopt_after=ADOPT_SECONDS, **conf)
            return len(job.processes) - 1

        start(0, node=0)
        vanishes = start(1, node=1)
        parked = start(0)
        job.wait_until(lambda: job.agent_of(1) == vanishes)
        network.cut(1)
        job.wait_until(lambda: job.agent_of(1) == parked)
        at_risk = f"not protected against the loss of machine {network.address(0)}, which has its"
        assert at_risk in job.logs()
        fresh = start(2)
        job.wait_until(lambda: job.agent_of(1) == fresh)
        network.mend(1)
        (folder / "hurry").touch()
        job.wait_until(lambda: len(job.finals()) == 2)
        assert job.finals()[0]["lost"] == [(0, 1), (1,), (1,)], job.logs()
        for final, wanted in zip(job.finals(), undisturbed, strict=True):
            for name, value in wanted["model"].items():
                assert torch.equal(final["model"][name], value), name
        assert job.codes() == [0] * 4, job.logs()
