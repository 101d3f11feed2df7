"""Two hosts as network namespaces; the wire between them is cut and mended."""

import pytest

from python_tests.distributed.cluster import Cluster
from python_tests.distributed.namespaces import ADDRESSES, NAMES, NoNamespacesError, ip, two_hosts


@pytest.fixture
def hosts():
    try:
        with two_hosts() as nurseries:
            yield nurseries
    except NoNamespacesError as error:
        pytest.skip(str(error))


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
