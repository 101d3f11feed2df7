"""A process group of one rank for the tests that need no second; workers' processes for others."""

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
