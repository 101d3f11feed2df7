"""A process group of one rank for the tests that need no second."""

import pytest
import torch


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """This process is a group of one rank."""
    from python_tests.integrations.sharded_models import join

    join(tmp_path_factory.mktemp("alone") / "meeting")
    yield
    torch.distributed.destroy_process_group()
