"""Shared by the tests of live recovery: who forks workers, and where they meet."""

import asyncio
import threading

import pytest

from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.distributed.rendezvous_host import listen
from python_tests.distributed.cluster import Nursery, clusters
from python_tests.distributed.losses import Untouched


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def make_cluster(nursery, tmp_path):
    with clusters(nursery, tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def untouched(nursery, tmp_path_factory):
    return Untouched(nursery, tmp_path_factory)


@pytest.fixture(scope="module")
def place(request):
    """Where a host listens that knows the ``SECRET`` of the test's module."""
    listener = listen("127.0.0.1", 0)
    serving = Host(request.module.SECRET.encode(), is_first=True).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return listener.getsockname()
