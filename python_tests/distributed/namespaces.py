"""Hosts on one machine: network namespaces of our own, and a bridge between them."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from python_tests.distributed.cluster import Nursery

_NOWHERE = "02:00:00:00:00:99"  # no interface has it


class NoNamespacesError(Exception):
    """This machine gives us none; says why."""


@contextmanager
def or_skipped():
    """Skip the test where the block finds that this machine gives us none."""
    try:
        yield
    except NoNamespacesError as error:
        pytest.skip(str(error))


def ip(*arguments):
    if shutil.which("ip") is None:
        raise NoNamespacesError("no network namespaces here: there is no command `ip`")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip()
        raise NoNamespacesError(f"no network namespaces here: ip {' '.join(arguments)}: {said}")


class Network:
    """Hosts, numbered from 0, each with an interface ``eth0`` behind a port of the bridge."""

    def __init__(self, num_hosts):
        self.hosts = range(num_hosts)
        self._tag = f"cpr{os.getpid()}"
        try:
            ip("netns", "add", self._bridge)
            ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            ip("-n", self._bridge, "link", "set", "br0", "up")
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self.close()
            raise

    @property
    def _bridge(self):
        return f"{self._tag}br"

    def name(self, host):
        return f"{self._tag}h{host}"

    def address(self, host):
        return f"10.231.77.{host + 1}"

    def prefix(self, host):
        """What a command begins with that runs on this host."""
        return ["ip", "netns", "exec", self.name(host)]

    def _add(self, host):
        name, port = self.name(host), f"p{host}"
        ip("netns", "add", name)
        ends = ["eth0", "netns", name, "type", "veth", "peer", port, "netns", self._bridge]
        ip("link", "add", *ends)
        ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
        ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", name, "link", "set", device, "up")

    def cut(self, host):
        """Cut a host off; nobody gets a FIN, and the host sees no carrier."""
        ip("-n", self._bridge, "link", "set", f"p{host}", "down")

    def mend(self, host):
        ip("-n", self._bridge, "link", "set", f"p{host}", "up")

    def mute(self, host, other):
        """Lose silently what ``host`` sends to ``other``; the other way is as before."""
        neighbour = [self.address(other), "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent"]
        ip("-n", self.name(host), "neigh", "replace", *neighbour)

    def unmute(self, host, other):
        ip("-n", self.name(host), "neigh", "del", self.address(other), "dev", "eth0")

    def slow(self, host, rate):
        """Let a host send at this rate at most (``tc tbf``), as ``2mbit``."""
        self._shape(host, "replace", "tbf", "rate", rate, "burst", "32k", "latency", "400ms")

    def fast(self, host):
        self._shape(host, "del")

    def _shape(self, host, what, *options):
        command = ["tc", "qdisc", what, "dev", "eth0", "root", *options]
        subprocess.run([*self.prefix(host), *command], check=True, capture_output=True)

    def close(self):
        if shutil.which("ip"):
            for name in (*map(self.name, self.hosts), self._bridge):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def hosts(num_hosts):
    """A network, and a nursery on each of its hosts."""
    nurseries = []
    network = Network(num_hosts)
    try:
        for host in network.hosts:
            nurseries.append(Nursery(network.prefix(host)))
        yield network, nurseries
    finally:
        for nursery in nurseries:
            nursery.close()
        network.close()
