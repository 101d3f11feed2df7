"""Small stores for the tests of the tools, and what they must hold."""

import cpr_ext
from cpr_ext import StoreOptions
from python_tests.helpers import Trained

TABLES = {"big": (700, 4), "mid": (90, 3), "small": (3, 2)}


def trained_store(
    directory, *, num_shards=3, snapshots=4, steps_between=3, priority=None, **options
):
    """A run with a base and ``snapshots`` partial ones, its snapshots waited for."""
    options = {"schedule": cpr_ext.EverySteps(10**9), "store": StoreOptions(None), **options}
    trained = Trained(
        directory,
        TABLES,
        num_shards=num_shards,
        priority=priority or cpr_ext.MostFrequentlyUsed(0.1),
        staging=cpr_ext.StagingOptions(slot_bytes=1 << 16),
        **options,
    )
    trained.checkpointer.recover()
    trained.train(1)
    trained.checkpointer.wait()
    for _ in range(snapshots):
        trained.train(steps_between)
        trained.checkpointer.save()
        trained.checkpointer.wait()
    return trained


def recovered(directory, *, num_shards=3, mode="partial", optimizer="adagrad"):
    """What a fresh process finds in the store: its report and a copy of all rows."""
    other = Trained(directory, TABLES, num_shards=num_shards, seed=99, optimizer=optimizer)
    try:
        report = other.checkpointer.recover(mode=mode)
        return report, other.rows(), other.state()
    finally:
        other.die()
