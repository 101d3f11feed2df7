"""Builds what a ``Checkpointer`` is made of."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.dense_capture import DenseCapture
from cpr_ext.checkpointer.settings import Settings
from cpr_ext.cuda import device_of, devices_of, make_stagers, use_training_streams
from cpr_ext.errors import UsageError
from cpr_ext.metrics.cost_meter import CostMeter
from cpr_ext.metrics.run_state import RunState
from cpr_ext.recovery.recoverer import Recoverer
from cpr_ext.saving.background_capture import Overlap
from cpr_ext.saving.priorities import make_tracker
from cpr_ext.saving.rebase_policy import BaseRule
from cpr_ext.saving.saver import Saver, SavingOptions
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import Selector
from cpr_ext.saving.slot_size import choose_slot_bytes
from cpr_ext.state.row_caches import refuse_cached_rows
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import Table, find_tables, prioritized_tables, register_tables
from cpr_ext.storage.commit_thread import Committer
from cpr_ext.storage.compactor import make_compactor
from cpr_ext.storage.remote.opening import RemoteStore, view_of
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.store import Store
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_watch import TableWatch


@dataclass(frozen=True)
class Parts:
    """What a ``Checkpointer`` is made of.

    Attributes:
        devices: GPUs that have tables.
        stagers: their staging buffers, which live as long as this.
        trackers: by table name.
        remote: copies the store to object storage; None: nothing does.
    """

    devices: Sequence[int]
    stagers: Sequence[Any]
    trackers: dict[str, Any]
    account: RunState
    store: Store
    recorder: LookupRecorder
    watch: TableWatch
    recoverer: Recoverer
    base_rule: BaseRule
    dense: DenseCapture
    saver: Saver
    remote: RemoteCopy | None
    inventory: Inventory


def choose_tables(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table] | None,
) -> list[Table]:
    """Return the given tables, or those that the model has.

    Raises:
        UsageError: there are none, and no empty list was given; or a cache holds newer rows.
    """
    chosen = (
        find_tables(model, optimizers) if tables is None else register_tables(tables, optimizers)
    )
    if not chosen and (tables is None or isinstance(tables, Mapping)):
        raise UsageError(
            "the model has no nn.Embedding or nn.EmbeddingBag; give its tables by name: "
            'Checkpointer(..., tables={"name": parameter})'
        )
    refuse_cached_rows(model, chosen)
    return chosen


def build_parts(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    tables: list[Table],
    directory: str | os.PathLike[str],
    settings: Settings,
    declared: Declared,
) -> Parts:
    """Build all parts, open the store, and attach the hooks.

    Raises:
        UsageError: the tables do not fit the settings.
        StoreError: the directory is not a store, holds another model, or is in use.
        StorageError: the directory cannot be made, read or written.
    """
    staging = settings.staging
    overlaps = Overlap.is_wanted(settings.overlap, tables)
    slot_bytes = choose_slot_bytes(staging.slot_bytes, tables, settings.precision)
    devices = devices_of(table.weight for table in tables)
    all_on_gpu = bool(tables) and all(device_of(t.weight) is not None for t in tables)
    use_training_streams(devices)
    stagers = make_stagers(devices, slot_bytes=slot_bytes, num_slots=staging.num_slots)
    threads = native.ThreadPool(num_threads=staging.num_threads or min(4, os.cpu_count() or 1))
    prioritized = {table.name for table in prioritized_tables(tables)}
    trackers = {
        table.name: make_tracker(
            settings.priority,
            table,
            table.name in prioritized,
            count_updates=settings.count_row_updates,
        )
        for table in tables
    }
    account = RunState(
        CostMeter(
            tables,
            prioritized,
            settings.priority.fraction,
            settings.num_shards,
            settings.precision,
        ),
        settings.schedule,
        settings.num_shards,
        settings.scalar_writer,
    )
    pipeline = native.SnapshotPipeline(
        num_slots=staging.num_slots,
        slot_bytes=slot_bytes,
        copy_on_write_bytes=staging.copy_on_write_bytes,
        pool=threads,
        stagers=stagers,
    )
    remote = None if settings.remote is None else RemoteStore(settings.remote, directory)
    store = Store(
        directory, tables=tables, num_shards=settings.num_shards, retention=settings.retention
    )
    recorder = LookupRecorder(tables, list(trackers.values()), threads)
    watch = TableWatch(tables, optimizers, trackers, threads)
    recoverer = Recoverer(
        model,
        optimizers,
        tables,
        store,
        trackers,
        recorder,
        threads,
        # Files that were made just now are in the page cache.
        direct_io=staging.direct_io and not (remote is not None and remote.was_read),
        declared=declared,
    )
    dense = DenseCapture(
        model,
        optimizers,
        tables,
        trackers,
        watch,
        account,
        declared,
        refuses_nan=settings.refuses_nan,
    )
    selector = Selector(
        tables,
        trackers,
        settings.priority,
        prioritized,
        settings.num_shards,
        threads,
        watch.is_proven,
        watch.has_kept_still,
    )
    base_rule = BaseRule(store, tables, settings.rebase_after)
    committer = Committer()
    inventory = Inventory(
        *(model, optimizers, tables, declared.stateful),
        is_declared=declared.extra_state is not None,
    )
    watch.stranger_stepped = inventory.note_stranger
    scrub = Scrub(tables, trackers, threads, is_watched=watch.is_proven)
    saver = Saver(
        store,
        tables,
        trackers,
        selector,
        pipeline,
        account,
        base_rule,
        committer,
        watch,
        scrub,
        inventory,
        overlap=Overlap(tables, watch, recorder, scrub) if overlaps else None,
        compactor=make_compactor(
            store,
            committer,
            tables,
            after=settings.compaction.after,
            bytes_per_second=settings.compaction.bytes_per_second,
        ),
        capture_dense=dense.capture,
        options=SavingOptions(
            settings.consistency,
            settings.when_busy,
            WriteOptions(
                staging.direct_io, refuse_nan=settings.refuses_nan, precision=settings.precision
            ),
            chooses_all=settings.priority.fraction >= 1,
            devices=devices,
            gather_bytes=staging.gather_bytes if all_on_gpu else 0,
        ),
    )
    copy = None
    if remote is not None:
        copy = _start_copy(remote, store, committer, account)
    recorder.attach()  # last: what fails above leaves the model as it was
    watch.attach()
    return Parts(
        devices,
        stagers,
        trackers,
        account,
        store,
        recorder,
        watch,
        recoverer,
        base_rule,
        dense,
        saver,
        copy,
        inventory,
    )


def _start_copy(
    remote: RemoteStore,
    store: Store,
    committer: Committer,
    account: RunState,
) -> RemoteCopy:
    """Copy the store now, and after each change of its manifests."""
    model = store.description
    try:
        copy = remote.start(store, model)
    except BaseException:
        committer.close()
        store.close()
        raise

    def submit() -> None:
        copy.submit(view_of(store, model))
        status = copy.status()
        account.metrics.note_remote_lag(status.lag_seconds, status.lag_bytes)

    committer.after_change = submit
    weakref.finalize(committer, copy.let_go).atexit = False
    return copy
