"""Builds what a ``Checkpointer`` is made of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.dense_capture import DenseCapture
from cpr_ext.checkpointer.options import CheckpointerOptions
from cpr_ext.errors import UsageError
from cpr_ext.metrics.run_state import CostMeter, RunState
from cpr_ext.recovery.recoverer import Recoverer
from cpr_ext.runtime.cuda import device_of, devices_of, make_stagers, use_training_streams
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.outcomes import Outcomes
from cpr_ext.saving.priorities import make_tracker
from cpr_ext.saving.rebase_policy import RebasePolicy
from cpr_ext.saving.saved_hashes import SavedHashes
from cpr_ext.saving.saver import Saver, SavingOptions, SavingParts
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.selection import Selector
from cpr_ext.saving.slot_size import choose_slot_bytes
from cpr_ext.saving.snapshot_rows import SnapshotContext
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import (
    Table,
    find_tables,
    prioritized_tables,
    refuse_cached_rows,
    register_tables,
)
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_watch import TableWatch
from cpr_ext.tracking.trackers import Tracker, native_trackers

# Of torch.distributed; classes that `fully_shard` makes derive from FSDPModule.
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def refuse_sharded_models(model: nn.Module) -> None:
    """Raise UsageError for FSDP, which holds parts of parameters, and takes their memory away."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _SHARDED and kind.__module__.startswith("torch.distributed"):
                raise UsageError(
                    f"module '{name or type(module).__name__}' is under {kind.__name__} (FSDP): "
                    "this process holds only parts of its parameters. Wrap the dense part in "
                    "DistributedDataParallel instead, and shard tables with TorchRec or by hand "
                    "(cpr_ext.Table with part=)"
                )


def refuse_several_processes() -> None:
    """Raise UsageError if this process trains with others, which would end at other steps."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f'on_sigterm="save" is for training in one process, and this is one of '
            f"{dist.get_world_size()}: SIGTERM reaches them at different steps. Leave it "
            "out. A cpr_ext.distributed.Worker does it by itself; without one, have your script "
            "end all of them after the same step: close() saves all rows"
        )


@dataclass(frozen=True)
class Parts:
    """What a ``Checkpointer`` is made of.

    Attributes:
        devices: GPUs that have tables.
        stagers: their staging buffers, which live as long as this.
        trackers: by table name.
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
            table.name: make_tracker(settings.priority, table, table.name in self.prioritized)
            for table in tables
        }
        self.watch = TableWatch(tables, trained.optimizers, self.trackers, threads)
        self.recorder = LookupRecorder(tables, self.watch.rows.counter, self.watch.note_lookups)
        self.keys = KeyWatch(tables, self.trackers, self.watch.count_rows)
        self.inventory = Inventory(*(trained.model, trained.optimizers, tables, trained.declared))
        self.watch.stranger_stepped = self.inventory.note_stranger
        self.hashes = SavedHashes(tables, self.trackers, threads)

    def make_memory(self) -> None:
        """Make the memory of counts and hashes, which else is made when rows are first met."""
        for tracker in self.trackers.values():
            for each in native_trackers(tracker):
                each.make_memory()
        self.hashes.make_memory()

    def attach(self) -> None:
        """Place the hooks."""
        self.recorder.attach()
        self.watch.attach()


class _Staging:
    """What copies rows on their way to files."""

    def __init__(self, trained: Trained) -> None:
        staging, tables = trained.settings.staging, trained.tables
        slot_bytes = choose_slot_bytes(staging.slot_bytes, tables, trained.settings.store.precision)
        self.devices = devices_of(table.weight for table in tables)
        use_training_streams(self.devices)
        slots = {"slot_bytes": slot_bytes, "num_slots": staging.num_slots}
        self.stagers = make_stagers(self.devices, **slots)
        num_threads = staging.num_threads or min(4, os.cpu_count() or 1)
        self.threads = native.ThreadPool(num_threads=num_threads)
        self.pipeline = native.SnapshotPipeline(
            **slots,
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
    origin = None
    if settings.store.remote is not None:
        origin = settings.store.remote.open(Path(directory).absolute())
    store = Store(
        directory,
        tables=tables,
        retention=settings.store.retention,
        origin=origin,
    )
    recoverer = Recoverer(
        *(model, optimizers, tables, store, settings.num_shards),
        *(tracking.trackers, tracking.recorder, tracking.keys, staging.threads),
        # Files that were made just now are in the page cache.
        direct_io=settings.staging.direct_io and not (origin is not None and origin.read_from),
        declared=declared,
    )
    dense = DenseCapture(
        *(model, optimizers, tables, tracking.trackers, tracking.watch, account, declared),
        refuses_nan=settings.store.refuses_nan,
    )
    rebase = RebasePolicy(store, tables, settings.store.rebase_after)
    committer = CommitThread()
    selector = _selector(trained, tracking, staging)
    context = SnapshotContext(store, selector, staging.pipeline, tracking.hashes)
    overlap = None
    if BackgroundCapture.is_wanted(tables):
        overlap = BackgroundCapture(tables, tracking.watch, tracking.recorder, tracking.hashes)
    options = _saving_options(trained)
    claims = Claims(
        *(tables, store, account, committer, tracking.watch, tracking.hashes),
        has_windows=overlap is not None,
    )
    outcomes = Outcomes(store, account, rebase, committer, staging.devices)
    known = (tracking.watch, tracking.inventory, tracking.keys)
    amount = CaptureAmount(
        *(tables, settings.priority, tracking.prioritized),
        lambda: tracking.recorder.num_lookups + tracking.watch.rows.num_updates,
        staging.pipeline.slot_bytes * settings.staging.num_slots,
        overlaps=overlap is not None,
    )
    parts = SavingParts(
        *(context, account, rebase, committer, *known, claims, outcomes, amount),
        *(overlap, dense.capture),
    )
    saver = Saver(parts, options)
    if store.is_empty:  # the first step's snapshot would wait; a run that resumes begins sooner
        tracking.make_memory()
    tracking.attach()  # last: what fails above leaves the model as it was
    return Parts(
        *(staging.devices, staging.stagers, tracking.trackers, account, store, tracking.recorder),
        *(tracking.watch, recoverer, rebase, dense, saver),
        *(tracking.inventory, tracking.keys),
    )


def _run_state(trained: Trained, tracking: _Tracking) -> RunState:
    settings = trained.settings
    meter = CostMeter(
        *(trained.tables, tracking.prioritized, settings.priority.fraction),
        *(settings.num_shards, settings.store.precision),
    )
    return RunState(meter, settings.schedule, settings.num_shards)


def _selector(trained: Trained, tracking: _Tracking, staging: _Staging) -> Selector:
    settings = trained.settings
    return Selector(
        *(trained.tables, tracking.trackers, settings.priority, tracking.prioritized),
        settings.num_shards,
        staging.threads,
        tracking.watch.changes.is_changed,
        tracking.keys,
    )


def _saving_options(trained: Trained) -> SavingOptions:
    settings, tables = trained.settings, trained.tables
    # Their keys and rows must be of one step, between two steps.
    is_keyed = any(table.slots is not None for table in tables)
    all_on_gpu = bool(tables) and all(device_of(table.weight) is not None for table in tables)
    return SavingOptions(
        is_keyed,
        WriteOptions(
            settings.staging.direct_io,
            refuse_nan=settings.store.refuses_nan,
            precision=settings.store.precision,
        ),
        gather_bytes=settings.staging.gather_bytes if all_on_gpu and not is_keyed else 0,
        slots_per_step=settings.staging.num_slots if all_on_gpu else 1,  # GPUs copy by themselves
    )
