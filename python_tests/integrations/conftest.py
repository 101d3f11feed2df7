"""A process group of one rank for the tests that need no second; workers' processes for others."""

import os
import signal

import pytest
import torch


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """This process is a group of one rank."""
    from python_tests.integrations.sharded_models import join

    join(tmp_path_factory.mktemp("alone") / "meeting")
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def torchrec_nursery():
    """A process that has imported TorchRec, and forks workers."""
    from python_tests.distributed.cluster import Nursery

    nursery = Nursery()
    nursery.ask(
        "wait", nursery.ask("call", "python_tests.integrations.planned_job", "imported"), 10
    )
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def run_ranks(torchrec_nursery):
    """Runs ``main(directory, rank, world_size)`` of a module in each rank's process, to its end."""

    def run(module, directory, world_size):
        ranks = [
            torchrec_nursery.ask("call", module, "main", str(directory), rank, world_size)
            for rank in range(world_size)
        ]
        ends = [torchrec_nursery.ask("wait", pid, 200) for pid in ranks]
        for pid, end in zip(ranks, ends, strict=True):
            if end is None:
                os.kill(pid, signal.SIGKILL)
        assert ends == [0] * world_size

    return run
