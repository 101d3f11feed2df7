"""Hosts as network namespaces; what is between them is cut and mended."""

import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
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
def opened():
    with ExitStack() as stack:
        yield stack


def make_job(opened, folder, num_hosts, *, collective_seconds=2.0, **settings):
    """A job with a worker on each host; the rendezvous is on the first."""
    with or_skipped():
        network, nurseries = opened.enter_context(hosts(num_hosts))
    cluster = Cluster(
        nurseries, folder, world_size=num_hosts, batch_size=11 * num_hosts, step_seconds=0.02,
        host=network.address(0),
        addresses={str(rank): network.address(rank) for rank in range(num_hosts)},
        time_outs={"collective_seconds": collective_seconds}, **settings,
    )  # fmt: skip
    opened.callback(cluster.close)
    cluster.start()
    cluster.wait_for_step(15)
    return network, nurseries, cluster


def test_a_worker_that_stops_is_no_loss_and_a_machine_that_is_cut_off_returns_or_is_replaced(
    opened, tmp_path
):
    """The rendezvous says so: collectives would wait longer than this test may take."""
    network, nurseries, cluster = make_job(
        opened, tmp_path, 3, num_steps=10_000, collective_seconds=1000.0
    )
    os.kill(cluster.pids[1], signal.SIGSTOP)
    time.sleep(2 * GONE_SECONDS)  # a look at a machine that lives shows nothing, however late
    os.kill(cluster.pids[1], signal.SIGCONT)
    cluster.wait_for_step(max(map(cluster.step, cluster.ranks)) + 5)
    assert [len(cluster.recovered(rank)) for rank in cluster.ranks] == [1] * 3
    network.cut(2)
    cluster.wait_for_loss(0, 1)
    network.mend(2)
    cluster.wait_for_recovery(2)
    for rank in cluster.ranks:
        last, lost = cluster.recovered(rank)[-1], cluster.events(rank, "peer_lost")[-1]
        assert (last["recovery"]["lost"], set(last["recovery"]["bytes_read"])) == ([], {0})
        assert last["tables"] == lost["tables"]
    network.cut(2)
    replaced, addresses = cluster.pids[2], {**cluster.settings.addresses, "2": network.address(0)}
    cluster.pids[2] = cluster.start_another(2, nurseries[0], addresses=addresses)
    cluster.wait_for_recovery(3, 0, 1)
    step = cluster.step(0)
    cluster.wait_until(lambda: cluster.step(0) > step + 2)
    network.mend(2)
    # The disk is common: its lock is overruled, and it writes nothing any more.
    assert cluster.wait_for_exit(replaced, 60) == 1, cluster.logs()
    assert "RendezvousError: worker 2 was replaced while the others" in cluster.logs()
    assert cluster.lost() == [[0, 1, 2], [], [2]]


def test_hosts_that_cannot_reach_each_other_name_who_does_not_answer_until_that_is_mended(
    opened, tmp_path
):
    """And nobody has lost anything."""
    network, _, cluster = make_job(opened, tmp_path, 3, num_steps=60, collective_seconds=1.0)
    network.mute(1, 2), network.mute(2, 1)
    cluster.wait_until(lambda: "so have all others, for each other: connections" in cluster.logs())
    named = r"could not connect to all 3 within \S+ s: 10\.231\.77\.[23] does not answer"
    cluster.wait_until(lambda: re.search(named, cluster.logs()))
    network.unmute(1, 2), network.unmute(2, 1)
    cluster.finish()
    assert not any(cluster.lost()[1:])


TRIES_END_SECONDS = 7  # of two tries to connect, as this kernel counts them


def connect_in_vain(rank, folder, address):
    group = ReformableGroup(rank, 2, "0")
    began = time.monotonic()
    group.configure(Round(FileStore(f"{folder}/store", 2), timedelta(seconds=1), address))
    with pytest.raises(PeerLostError, match="could not connect"):
        group.connect()
    group.abort()
    time.sleep(max(0.0, began + TRIES_END_SECONDS + 2 - time.monotonic()))
    Path(folder, str(rank)).write_text("lives")


def test_a_pair_that_cannot_connect_outlives_what_its_kernels_tried(opened, tmp_path):
    """Gloo aborts a process whose connection fails after it gave up the group, after 5.5 s."""
    with or_skipped():
        network, nurseries = opened.enter_context(hosts(2))
    for host in network.hosts:
        tries = ["sysctl", "-w", "net.ipv4.tcp_syn_retries=2"]
        subprocess.run([*network.prefix(host), *tries], check=True, capture_output=True)
    network.mute(0, 1), network.mute(1, 0)
    pids = [
        nursery.ask("call", __name__, "connect_in_vain", n, str(tmp_path), network.address(n))
        for n, nursery in enumerate(nurseries)
    ]
    ends = [nursery.ask("wait", pid, 100) for nursery, pid in zip(nurseries, pids, strict=True)]
    assert ends == [0, 0]
