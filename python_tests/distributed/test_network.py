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


def test_a_worker_that_was_replaced_while_it_was_cut_off_ends_when_it_returns(hosts, tmp_path):
    addresses = {"0": ADDRESSES[0], "1": ADDRESSES[1]}
    cluster = Cluster(
        hosts, tmp_path, num_steps=150, world_size=2, step_seconds=0.02, host=ADDRESSES[0],
        addresses=addresses, time_outs={"collective_seconds": 2.0},
    )  # fmt: skip
    try:
        cluster.start()
        cluster.wait_for_step(15)
        ip("-n", NAMES[0], "link", "set", "wire", "down")
        replaced = cluster.pids[1]
        cluster.pids[1] = cluster.start_another(
            1, hosts[0], stores="another disk", addresses={**addresses, "1": ADDRESSES[0]}
        )
        cluster.wait_until(lambda: len(cluster.recoveries(0)) == 2)
        cluster.wait_until(lambda: cluster.step(0) > cluster.recoveries(0)[1]["step"] + 2)
        ip("-n", NAMES[0], "link", "set", "wire", "up")
        assert cluster.wait_for_exit(replaced, 60) == 1, cluster.logs()
        assert "RendezvousError: worker 1 was replaced while the others" in cluster.logs()
        cluster.finish()
        assert [e["recovery"]["lost"] for e in cluster.recoveries(0)] == [[0, 1], [1]]
    finally:
        cluster.close()
