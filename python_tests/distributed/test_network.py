"""Hosts as network namespaces; what is between them is cut and mended."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from cpr_ext.distributed.collective.process_group import ReformableGroup, Round
from cpr_ext.distributed.rendezvous.host import _GONE_SECONDS as GONE_SECONDS
from cpr_ext.errors import PeerLostError
from python_tests.distributed.cluster import Cluster
from python_tests.distributed.namespaces import hosts, or_skipped


@pytest.fixture
def make_job(tmp_path):
    """A job with a worker on each host, or two; the rendezvous is on the first."""
    opened = []

    def make(num_hosts, *, workers=None, collective_seconds=2.0, **settings):
        around = hosts(num_hosts)
        with or_skipped():
            network, nurseries = around.__enter__()
        opened.append(around)
        world_size = workers or num_hosts
        addresses = {str(rank): network.address(rank % num_hosts) for rank in range(world_size)}
        cluster = Cluster(
            nurseries, tmp_path, world_size=world_size, step_seconds=0.02,
            host=network.address(0), addresses=addresses,
            time_outs={"collective_seconds": collective_seconds}, **settings,
        )  # fmt: skip
        opened.append(cluster)
        cluster.start()
        cluster.wait_for_step(15)
        return network, nurseries, cluster

    yield make
    for each in reversed(opened):
        each.close() if isinstance(each, Cluster) else each.__exit__(None, None, None)


def test_hosts_that_are_cut_off_from_each_other_go_on_once_the_wire_is_mended(make_job):
    network, _, cluster = make_job(2, workers=4, num_steps=80)
    network.cut(1)
    for rank in cluster.ranks:
        cluster.wait_until(lambda rank=rank: cluster.events(rank, "peer_lost"))
    stopped_at = [cluster.step(rank) for rank in cluster.ranks]
    network.mend(1)
    cluster.finish()
    assert max(stopped_at) < 80
    for rank in cluster.ranks:
        last = cluster.recoveries(rank)[-1]
        assert last["recovery"]["lost"] == []
        assert last["recovery"]["bytes_read"] == [0, 0, 0, 0]
        lost = cluster.events(rank, "peer_lost")[-1]
        assert last["tables"] == lost["tables"]


def test_the_host_says_at_once_that_a_machine_vanished_and_a_worker_that_stops_is_no_loss(make_job):
    """Collectives would wait longer than this test may take."""
    network, nurseries, cluster = make_job(4, num_steps=10_000, collective_seconds=1000.0)
    os.kill(cluster.pids[1], signal.SIGSTOP)
    time.sleep(2 * GONE_SECONDS)  # a look at a machine that lives shows nothing, however late
    os.kill(cluster.pids[1], signal.SIGCONT)
    cluster.wait_for_step(max(map(cluster.step, cluster.ranks)) + 5)
    assert [len(cluster.recoveries(rank)) for rank in cluster.ranks] == [1] * 4
    network.cut(2)
    for rank in (0, 1, 3):
        cluster.wait_until(lambda rank=rank: cluster.events(rank, "peer_lost"))
    addresses = {**cluster.settings.addresses, "2": network.address(0)}
    cluster.pids[2] = cluster.start_another(
        2, nurseries[0], stores="another disk", addresses=addresses
    )
    for rank in (0, 1, 3):
        cluster.wait_until(lambda rank=rank: len(cluster.recoveries(rank)) == 2)
        assert cluster.recoveries(rank)[1]["recovery"]["lost"] == [2]


@pytest.mark.parametrize("stores", ["another disk", None])
def test_a_worker_that_was_replaced_while_it_was_cut_off_ends_when_it_returns(make_job, stores):
    """With one disk for all hosts its lock is overruled, and it writes nothing any more."""
    network, nurseries, cluster = make_job(2, num_steps=150)
    network.cut(1)
    replaced = cluster.pids[1]
    addresses = dict.fromkeys("01", network.address(0))
    changed = {"stores": stores} if stores else {}
    cluster.pids[1] = cluster.start_another(1, nurseries[0], addresses=addresses, **changed)
    cluster.wait_until(lambda: len(cluster.recoveries(0)) == 2)
    cluster.wait_until(lambda: cluster.step(0) > cluster.recoveries(0)[1]["step"] + 2)
    network.mend(1)
    assert cluster.wait_for_exit(replaced, 60) == 1, cluster.logs()
    assert "RendezvousError: worker 1 was replaced while the others" in cluster.logs()
    cluster.finish()
    assert [e["recovery"]["lost"] for e in cluster.recoveries(0)] == [[0, 1], [1]]


@pytest.mark.parametrize("mended", [True, pytest.param(False, marks=pytest.mark.long)])
def test_one_of_two_hosts_that_cannot_reach_each_other_steps_aside(make_job, mended):
    """It returns if that is mended, and nobody has lost anything; else another takes its place."""
    network, nurseries, cluster = make_job(4, num_steps=60)
    network.mute(1, 2), network.mute(2, 1)
    cluster.wait_until(lambda: cluster.logs().count("for worker 2, which waits aside") >= 2)
    assert "cannot reach worker 2 (process" in cluster.logs()
    if mended:
        network.unmute(1, 2), network.unmute(2, 1)
        cluster.finish()
        assert [e["recovery"]["lost"] for e in cluster.recoveries(0)[1:]] == [[]]
        return
    aside = cluster.pids[2]
    addresses = {**cluster.settings.addresses, "2": network.address(0)}
    cluster.pids[2] = cluster.start_another(
        2, nurseries[0], stores="another disk", addresses=addresses
    )
    assert cluster.wait_for_exit(aside, 60) == 1, cluster.logs()
    cluster.finish()
    assert cluster.recoveries(0)[-1]["recovery"]["lost"] == [2]


TRIES_END_SECONDS = 15  # of three tries to connect, as this kernel counts them


def connect_in_vain(rank, folder, address):
    group = ReformableGroup(rank, 2, "0")
    began = time.monotonic()
    group.configure(Round(FileStore(f"{folder}/store", 2), timedelta(seconds=1), address))
    with pytest.raises(PeerLostError, match="could not connect"):
        group.connect()
    group.abort()
    time.sleep(max(0.0, began + TRIES_END_SECONDS + 5 - time.monotonic()))
    Path(folder, str(rank)).write_text("lives")


def test_a_pair_that_cannot_connect_outlives_what_its_kernels_tried(tmp_path):
    """Gloo aborts a process whose connection fails after it gave up the group, after 5.5 s."""
    around = hosts(2)
    with or_skipped():
        network, nurseries = around.__enter__()
    try:
        for host in network.hosts:
            tries = ["sysctl", "-w", "net.ipv4.tcp_syn_retries=3"]
            subprocess.run([*network.prefix(host), *tries], check=True, capture_output=True)
        network.mute(0, 1), network.mute(1, 0)
        pids = [
            nursery.ask("call", __name__, "connect_in_vain", rank, str(tmp_path), address)
            for rank, nursery in enumerate(nurseries)
            for address in [network.address(rank)]
        ]
        for nursery, pid in zip(nurseries, pids, strict=True):
            assert nursery.ask("wait", pid, 100) == 0
    finally:
        around.__exit__(None, None, None)
    assert all((tmp_path / str(rank)).exists() for rank in range(2))
