"""Under which address peers reach a worker; a machine's own ``/etc/hosts`` may say a wrong one."""

import socket

import pytest

from cpr_ext.distributed.identity import own_address as module
from cpr_ext.distributed.identity.own_address import own_address
from cpr_ext.distributed.identity.worker_identity import Identity
from cpr_ext.distributed.rendezvous_host import listen
from cpr_ext.errors import UsageError

NODE = "203.0.113.7"  # of documentation


@pytest.fixture
def names(monkeypatch):
    """What names stand for on this machine."""
    known = {"node0": "127.0.1.1", "node1": NODE}
    real = socket.getaddrinfo

    def look_up(host, *given, **options):
        return real(known.get(host, host), *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(module, "_is_of_this_machine", lambda address: address != NODE)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return known


def identity(host, address=None):
    return Identity(0, 2, host, 29400, address=address)


def test_a_host_name_that_is_loopback_is_not_given_to_peers(names, monkeypatch):
    monkeypatch.setattr(module, "_source_address", lambda known: "10.1.2.3")
    assert own_address(identity("10.1.2.9")) == "10.1.2.3"


def test_an_address_of_loopback_is_refused_where_other_machines_take_part(names, monkeypatch):
    with pytest.raises(UsageError, match=r"'node0' is 127.0.0.1 on this .*CPR_RENDEZVOUS.*CPR_ADD"):
        own_address(identity("node0"))
    assert own_address(identity("127.0.0.1")) == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # all are here
    assert own_address(identity("node0")) == "127.0.0.1"


def test_an_address_that_peers_cannot_use_is_refused(names):
    with pytest.raises(UsageError, match=r"'203.0.113.7' is no address of this machine"):
        own_address(identity("127.0.0.1", NODE))
    with pytest.raises(UsageError, match=r"has no way to the rendezvous at no.such.name.invalid"):
        own_address(identity("no.such.name.invalid"))
    with pytest.raises(UsageError, match=r"'node0' is 127.0.1.1 on this machine"):
        listen("node0", 0)
    listen("127.0.0.1", 0).close()
