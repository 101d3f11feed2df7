"""A job that loses workers, beside the same job that loses none."""

import os
import random
import signal
import time

import pytest

from cpr_ext.distributed import worker_directory
from cpr_ext.storage.store_reader import StoreReader
from python_tests.distributed.cluster import PATIENT, WAIT_SECONDS, Cluster

SHAPES = {"three": (3, 3), "mirror": (2, 2), "two mirrors": (4, 2), "four": (4, 4)}
STEPS = 10
# What changes nothing of how a job ends that loses nobody.
NO_MATTER = ("rebuild_rate", "parity_every", "encode_rate", "device")


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def mlp(shape="mirror", recovery="exact", num_steps=None, **options):
    """Settings of a job with parity; the options are those of ``mlp_job.py``."""
    world_size, group_size = SHAPES[shape]
    return {
        "job": ("python_tests.distributed.mlp_job", "MlpJob"), "world_size": world_size,
        "recovery": recovery, "num_steps": num_steps or (12 if "keyed" in options else STEPS),
        "every_steps": 4, "priority": "AllRows", "time_outs": PATIENT,
        "options": {"draws": True, "group_size": group_size, **options},
    }  # fmt: skip


class Untouched:
    """The states of jobs that lose nobody, by all that decides them."""

    def __init__(self, nursery, folders):
        self._nursery, self._folders, self._known = nursery, folders, {}

    def __call__(self, settings):
        options = {n: v for n, v in settings["options"].items() if n not in NO_MATTER}
        key = repr(settings := {**settings, "options": options, "recovery": "exact"})
        if key not in self._known:
            cluster = Cluster([self._nursery], self._folders.mktemp("untouched"), **settings)
            cluster.run()
            self._known[key] = cluster.states()
        return self._known[key]


def require_states(cluster, expected, killed=None):
    """Every step is as without kills; whoever dies may not live to note the step it had made."""
    if killed is None:
        killed = [rank for rank, deaths in cluster.settings.deaths.items() for _ in deaths]
    found, last = cluster.states(), cluster.settings.num_steps
    assert found == {at: known for at, known in expected.items() if at in found}
    for rank, step in expected.keys() - found.keys():
        assert step < last, (rank, step)
        if not cluster.settings.options.get("rebuild_rate"):  # then rows are missing for a while
            killed.remove(rank)
    for rank in cluster.ranks:
        store = worker_directory(cluster.stores, rank, cluster.settings.world_size)
        newest = StoreReader(store).manifest.dense[-1]
        assert (newest.last_step, newest.is_complete) == (last, True)


def require_nothing_lost(cluster, expected, lost=None):
    """``lost``: whom the last recovery names."""
    cluster.run()
    require_states(cluster, expected)
    recovery = cluster.settings.recovery
    for told in cluster.recoveries()[1:]:
        assert (told["recovery"], told["obstacle"]) == (recovery, "")
        assert set(told["samples_lost"]) == {0}
        assert recovery == "full" or set(told["bytes_read"]) == {0}
    assert lost in (None, cluster.lost()[-1])


def kill_at_random(cluster, expected, kills):
    """Some kills hit a replacement before, while or after it recovers."""
    chance, steps = random.Random(), cluster.settings.num_steps
    cluster.start()
    victim, killed = None, []
    for moment in sorted(chance.sample(range(1, steps - 5), kills)):
        cluster.wait_until(lambda moment=moment: cluster.newest_step() >= moment, WAIT_SECONDS)
        if victim is None or is_back(cluster, victim) or chance.random() < 0.5:
            if victim is not None:
                cluster.wait_until(lambda rank=victim: is_back(cluster, rank), WAIT_SECONDS)
            victim = chance.choice(cluster.ranks)
        time.sleep(0.2 * chance.random())
        if cluster.exit_code(victim, 0) is None:
            os.kill(cluster.pids[victim], signal.SIGKILL)
            if cluster.exit_code(victim) == -signal.SIGKILL:
                killed.append(victim)
                cluster.start(victim)
    cluster.finish(WAIT_SECONDS)
    require_states(cluster, expected, killed)
    told = {recovery["recovery"] for recovery in cluster.recoveries()[1:]}
    assert told <= {cluster.settings.recovery}
    print(f"{len(killed)} kills, {cluster.lost()[1:]}, {len(cluster.states())} states compared")


def is_back(cluster, rank):
    """This process has recovered, and its group is protected; or the job was finished."""
    events = [e for e in cluster.events(rank) if e["pid"] == cluster.pids[rank]]
    kinds = ("ended",) if cluster.settings.recovery == "exact" else ("ended", "recovered")
    return any(e["event"] in kinds or e.get("protected") for e in events)
