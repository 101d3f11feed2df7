"""A process group of one rank for the tests that need no second; workers' processes for others."""

import os
import signal

import pytest
import torch

from python_tests.distributed.cluster import Nursery, clusters
from python_tests.distributed.losses import Untouched

WAIT_SECONDS = 200


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
    nursery = Nursery()
    nursery.ask(
        "wait", nursery.ask("call", "python_tests.integrations.planned_job", "imported"), 60
    )
    yield nursery
    nursery.close()


@pytest.fixture
def make_cluster(torchrec_nursery, tmp_path):
    with clusters(torchrec_nursery, tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def untouched(torchrec_nursery, tmp_path_factory):
    return Untouched(torchrec_nursery, tmp_path_factory)


class Ranks:
    """Calls ``function(directory, rank, *arguments)`` in each process of a group."""

    def __init__(self, nursery, folders):
        self.nursery, self._folders = nursery, folders

    def start(self, function, directory, world_size, *arguments):
        """Return the numbers of the processes."""
        given = (
            *("call", "python_tests.integrations.sharded_models", "run_rank"),
            *(function.__module__, function.__name__),
            *(str(self._folders.mktemp("meeting") / "file"), str(directory)),
        )
        return [
            self.nursery.ask(*given, rank, world_size, *arguments) for rank in range(world_size)
        ]

    def run(self, function, directory, world_size, *arguments):
        """Return what each returned."""
        pids = self.start(function, directory, world_size, *arguments)
        ends = [self.nursery.ask("wait", pid, WAIT_SECONDS) for pid in pids]
        for pid, end in zip(pids, ends, strict=True):
            if end is None:
                os.kill(pid, signal.SIGKILL)
        assert ends == [0] * world_size, self.logs(directory)
        files = [directory / f"{function.__name__}-{rank}.pt" for rank in range(world_size)]
        return [torch.load(file, weights_only=False) for file in files]

    @staticmethod
    def logs(directory):
        return "\n".join(path.read_text()[-3000:] for path in directory.glob("log-*"))


@pytest.fixture(scope="session")
def ranks(torchrec_nursery, tmp_path_factory):
    return Ranks(torchrec_nursery, tmp_path_factory)
