"""Two hosts on one machine: network namespaces of our own with a wire between them."""

import os
import shutil
import subprocess
from contextlib import contextmanager

from python_tests.distributed.cluster import Nursery

NAMES = [f"cpr{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.231.77.1", "10.231.77.2"]


class NoNamespacesError(Exception):
    """This machine gives us none; says why."""


def ip(*arguments):
    if shutil.which("ip") is None:
        raise NoNamespacesError("no network namespaces here: there is no command `ip`")
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip()
        raise NoNamespacesError(f"no network namespaces here: ip {' '.join(arguments)}: {said}")


@contextmanager
def two_hosts():
    """Two nurseries, each behind its end of the wire."""
    nurseries = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ends = ["wire", "netns", NAMES[0], "type", "veth", "peer", "wire", "netns", NAMES[1]]
        ip("link", "add", *ends)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
            nurseries.append(Nursery(["ip", "netns", "exec", name]))
        yield nurseries
    finally:
        for nursery in nurseries:
            nursery.close()
        if shutil.which("ip"):
            for name in NAMES:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
