"""Builds what a ``Checkpointer`` is made of."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.all_options import CheckpointerOptions
from cpr_ext.checkpointer.dense_capture import DenseCapture
from cpr_ext.errors import UsageError
from cpr_ext.metrics.cost_meter import CostMeter
from cpr_ext.metrics.run_state import RunState
from cpr_ext.recovery.recoverer import Recoverer
from cpr_ext.runtime.cuda import device_of, devices_of, make_stagers, use_training_streams
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.outcomes import Outcomes
from cpr_ext.saving.priorities import make_tracker
from cpr_ext.saving.rebase_policy import RebasePolicy
from cpr_ext.saving.saver import Saver, SavingOptions, SavingParts
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import Selector
from cpr_ext.saving.slot_size import choose_slot_bytes
from cpr_ext.saving.snapshot_rows import SnapshotContext
from cpr_ext.state.row_caches import refuse_cached_rows
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import Table, find_tables, prioritized_tables, register_tables
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.compactor import Compactor, make_compactor
from cpr_ext.storage.remote.opening import RemoteStore, view_of
from cpr_ext.storage.remote.remote_copy import RemoteCopy
from cpr_ext.storage.store import Store
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_watch import TableWatch
from cpr_ext.tracking.trackers import Tracker, native_trackers


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
    stagers: Sequence[native.DeviceStager]
    trackers: dict[str, Tracker]
    account: RunState
    store: Store
    recorder: LookupRecorder
    watch: TableWatch
    recoverer: Recoverer
    rebase: RebasePolicy
    dense: DenseCapture
    saver: Saver
    remote: RemoteCopy | None
    inventory: Inventory
    keys: KeyWatch


@dataclass(frozen=True)
class Trained:
    """What is trained, and how it is saved."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    tables: list[Table]
    settings: CheckpointerOptions
    declared: Declared


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


class _Tracking:
    """What sees the changes of tables."""

    def __init__(self, trained: Trained, threads: native.ThreadPool) -> None:
        tables, settings = trained.tables, trained.settings
        self.prioritized = {table.name for table in prioritized_tables(tables)}
        self.trackers = {
            table.name: make_tracker(
                settings.priority,
                table,
                table.name in self.prioritized,
                count_updates=settings.count_row_updates,
            )
            for table in tables
        }
        self.watch = TableWatch(tables, trained.optimizers, self.trackers, threads)
        self.recorder = LookupRecorder(tables, self.watch.rows.counter)
        self.keys = KeyWatch(tables, self.trackers, self.watch.count_rows)
        self.inventory = Inventory(
            *(trained.model, trained.optimizers, tables, trained.declared, self.watch.gradients)
        )
        self.watch.stranger_stepped = self.inventory.note_stranger
        self.scrub = Scrub(
            *(tables, self.trackers, threads),
            is_watched=self.watch.changes.is_proven,
            is_rounded=not settings.precision.is_exact,
        )

    def make_memory(self) -> None:
        """Make the memory of counts and hashes, which else is made when rows are first met."""
        for tracker in self.trackers.values():
            for each in native_trackers(tracker):
                each.make_memory()
        self.scrub.make_memory()

    def attach(self) -> None:
        """Place the hooks."""
        self.recorder.attach()
        self.watch.attach()


class _Staging:
    """What copies rows on their way to files."""

    def __init__(self, trained: Trained) -> None:
        staging, tables = trained.settings.staging, trained.tables
        slot_bytes = choose_slot_bytes(staging.slot_bytes, tables, trained.settings.precision)
        self.devices = devices_of(table.weight for table in tables)
        use_training_streams(self.devices)
        slots = {"slot_bytes": slot_bytes, "num_slots": staging.num_slots}
        self.stagers = make_stagers(self.devices, **slots)
        num_threads = staging.num_threads or min(4, os.cpu_count() or 1)
        self.threads = native.ThreadPool(num_threads=num_threads)
        self.pipeline = native.SnapshotPipeline(
            **slots,
            copy_on_write_bytes=staging.copy_on_write_bytes,
            pool=self.threads,
            stagers=self.stagers,
        )


def build_parts(trained: Trained, directory: str | os.PathLike[str]) -> Parts:
    """Build all parts, open the store, and attach the hooks.

    Raises:
        UsageError: the tables do not fit the settings.
        StoreError: the directory is not a store, holds another model, or is in use.
        StorageError: the directory cannot be made, read or written.
    """
    settings, tables = trained.settings, trained.tables
    model, optimizers, declared = trained.model, trained.optimizers, trained.declared
    staging = _Staging(trained)
    tracking = _Tracking(trained, staging.threads)
    account = _run_state(trained, tracking)
    remote = None if settings.remote is None else RemoteStore(settings.remote, directory)
    store = Store(
        directory, tables=tables, num_shards=settings.num_shards, retention=settings.retention
    )
    recoverer = Recoverer(
        *(model, optimizers, tables, store),
        *(tracking.trackers, tracking.recorder, tracking.keys, staging.threads),
        # Files that were made just now are in the page cache.
        direct_io=settings.staging.direct_io and not (remote is not None and remote.was_read),
        declared=declared,
    )
    dense = DenseCapture(
        *(model, optimizers, tables, tracking.trackers, tracking.watch, account, declared),
        refuses_nan=settings.refuses_nan,
    )
    dense.ignored = lambda: tracking.inventory.ignored
    rebase = RebasePolicy(store, tables, settings.rebase_after)
    committer = CommitThread()
    selector = _selector(trained, tracking, staging)
    context = SnapshotContext(store, selector, staging.pipeline, tracking.scrub)
    overlap = None
    if BackgroundCapture.is_wanted(settings.overlap, tables):
        overlap = BackgroundCapture(tables, tracking.watch, tracking.recorder, tracking.scrub)
    options = _saving_options(trained, staging.devices)
    claims = Claims(
        *(tables, tracking.trackers, store, account, rebase, committer),
        *(tracking.watch, tracking.scrub, options.write),
    )
    compactor = _compactor(trained, store, committer)
    outcomes = Outcomes(store, account, rebase, committer, compactor, staging.devices)
    known = (tracking.watch, tracking.inventory, tracking.keys)
    parts = SavingParts(
        *(context, account, rebase, committer, *known, claims, outcomes, overlap, dense.capture)
    )
    saver = Saver(parts, options)
    copy = None if remote is None else _start_copy(remote, store, committer, account)
    if store.is_empty:  # the first step's snapshot would wait; a run that resumes begins sooner
        tracking.make_memory()
        if overlap is not None and settings.consistency == "step":
            staging.pipeline.make_memory()
    tracking.attach()  # last: what fails above leaves the model as it was
    return Parts(
        *(staging.devices, staging.stagers, tracking.trackers, account, store, tracking.recorder),
        *(tracking.watch, recoverer, rebase, dense, saver, copy),
        *(tracking.inventory, tracking.keys),
    )


def _compactor(trained: Trained, store: Store, committer: CommitThread) -> Compactor | None:
    when = trained.settings.compaction
    return make_compactor(
        *(store, committer, trained.tables),
        after=when.after,
        bytes_per_second=when.bytes_per_second,
    )


def _run_state(trained: Trained, tracking: _Tracking) -> RunState:
    settings = trained.settings
    meter = CostMeter(
        *(trained.tables, tracking.prioritized, settings.priority.fraction),
        *(settings.num_shards, settings.precision),
    )
    return RunState(meter, settings.schedule, settings.num_shards, settings.scalar_writer)


def _selector(trained: Trained, tracking: _Tracking, staging: _Staging) -> Selector:
    settings = trained.settings
    return Selector(
        *(trained.tables, tracking.trackers, settings.priority, tracking.prioritized),
        settings.num_shards,
        staging.threads,
        tracking.watch.changes.is_proven,
        tracking.watch.changes.has_kept_still,
        tracking.keys,
    )


def _saving_options(trained: Trained, devices: Sequence[int]) -> SavingOptions:
    settings, tables = trained.settings, trained.tables
    # Their keys and rows must be of one step, between two steps.
    is_keyed = any(table.slots is not None for table in tables)
    all_on_gpu = bool(tables) and all(device_of(table.weight) is not None for table in tables)
    return SavingOptions(
        "step" if is_keyed else settings.consistency,
        settings.when_busy,
        WriteOptions(
            settings.staging.direct_io,
            refuse_nan=settings.refuses_nan,
            precision=settings.precision,
        ),
        chooses_all=settings.chooses_all,
        devices=devices,
        gather_bytes=settings.staging.gather_bytes if all_on_gpu and not is_keyed else 0,
        slots_per_step=settings.staging.num_slots if all_on_gpu else 1,  # GPUs copy by themselves
    )


def _start_copy(
    remote: RemoteStore,
    store: Store,
    committer: CommitThread,
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
