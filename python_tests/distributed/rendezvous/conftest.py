"""Shared by the tests of the rendezvous."""

import asyncio
import threading

import pytest

from cpr_ext.distributed.rendezvous.host import Host
from cpr_ext.distributed.rendezvous_host import listen


@pytest.fixture(scope="module")
def place(request):
    """Where a host listens that knows the ``SECRET`` of the test's module."""
    listener = listen("127.0.0.1", 0)
    serving = Host(request.module.SECRET.encode(), is_first=True).serve(listener)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return listener.getsockname()
