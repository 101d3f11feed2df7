"""What a session is built of."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from cpr_ext._native import native
from cpr_ext.checkpointer.options import CheckpointerOptions
from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import device_of, devices_of, make_stagers, use_training_streams
from cpr_ext.saving.priorities import make_tracker
from cpr_ext.saving.saved_hashes import SavedHashes
from cpr_ext.saving.saver import SavingOptions
from cpr_ext.saving.segment_capture import WriteOptions
from cpr_ext.saving.slot_size import choose_slot_bytes
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import (
    Table,
    find_tables,
    prioritized_tables,
    refuse_cached_rows,
    register_tables,
)
from cpr_ext.tracking.inventory import Inventory
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.lookup_recorder import LookupRecorder
from cpr_ext.tracking.table_events import TableEvents
from cpr_ext.tracking.table_watch import TableWatch

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


class Tracking:
    """What sees the changes of tables."""

    def __init__(self, trained: Trained, threads: native.ThreadPool) -> None:
        tables, settings = trained.tables, trained.settings
        self.prioritized = {table.name for table in prioritized_tables(tables)}
        self.trackers = {
            table.name: make_tracker(settings.priority, table, table.name in self.prioritized)
            for table in tables
        }
        self.events = TableEvents()
        self.watch = TableWatch(tables, trained.optimizers, self.trackers, threads, self.events)
        self.recorder = LookupRecorder(
            *(tables, self.watch.rows.counter, self.events), self.watch.rows_change
        )
        self.keys = KeyWatch(tables, self.trackers, self.watch.count_rows)
        self.inventory = Inventory(
            *(trained.model, trained.optimizers, tables, trained.declared), self.events
        )
        self.hashes = SavedHashes(tables, self.trackers, threads)

    def make_memory(self) -> None:
        """Make the memory of counts and hashes, which else is made when rows are first met."""
        for tracker in self.trackers.values():
            tracker.make_memory()
        self.hashes.make_memory()

    def attach(self) -> None:
        """Place the hooks."""
        self.recorder.attach()
        self.watch.attach()


class Staging:
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


def saving_options(trained: Trained) -> SavingOptions:
    """Return how snapshots are taken."""
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
