"""Two hosts as network namespaces; the wire between them is cut and mended."""

import os
import shutil
import subprocess

import pytest

from python_tests.distributed.cluster import Cluster, Nursery

NAMES = [f"cpr{os.getpid()}{side}" for side in "ab"]
ADDRESSES = ["10.231.77.1", "10.231.77.2"]


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def hosts():
    """Two nurseries, each behind its end of a wire."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: there is no command `ip`")
    nurseries = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "wire",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "wire",
            "netns",
            NAMES[1],
        )
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
            nurseries.append(Nursery(["ip", "netns", "exec", name]))
        yield nurseries
    finally:
        for nursery in nurseries:
            nursery.close()
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_hosts_that_are_cut_off_from_each_other_go_on_once_the_wire_is_mended(hosts, tmp_path):
    cluster = Cluster(
        hosts, tmp_path, num_steps=80, step_seconds=0.02, host=ADDRESSES[0],
        addresses={str(rank): ADDRESSES[rank % 2] for rank in range(4)},
        time_outs={"collective_seconds": 2.0},
    )  # fmt: skip
    try:
        cluster.start()
        cluster.wait_for_step(15)
        ip("-n", NAMES[0], "link", "set", "wire", "down")
        for rank in cluster.ranks:
            cluster.wait_until(lambda rank=rank: cluster.events(rank, "peer_lost"))
        stopped_at = [cluster.step(rank) for rank in cluster.ranks]
        ip("-n", NAMES[0], "link", "set", "wire", "up")
        cluster.finish()
        assert max(stopped_at) < 80
        for rank in cluster.ranks:
            last = cluster.recoveries(rank)[-1]
            assert last["recovery"]["lost"] == []
            assert last["recovery"]["bytes_read"] == [0, 0, 0, 0]
            lost = cluster.events(rank, "peer_lost")[-1]
            assert last["tables"] == lost["tables"]
    finally:
        cluster.close()
