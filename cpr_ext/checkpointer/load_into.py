"""Load what a model looks up and computes with, without optimizers: for evaluation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.recoverer import RecoveryMode
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import LiveModel
from cpr_ext.recovery.slot_settling import settle_slots
from cpr_ext.recovery.sources import OtherStores
from cpr_ext.recovery.state_source import StateSource
from cpr_ext.runtime.validation import require_model, require_one_of
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import restore_dense
from cpr_ext.state.table import Table, find_tables, register_tables
from cpr_ext.storage.store_reader import StoreReader, read_committed_all

_Path = str | os.PathLike[str]


def load_into(
    model: nn.Module,
    store: _Path | Sequence[_Path],
    *,
    tables: Mapping[str, torch.Tensor | nn.Module] | Sequence[Table] | None = None,
    mode: RecoveryMode = "partial",
    strict: bool = True,
) -> RecoveryReport:
    """Load a store's newest snapshot into a model, without its optimizers, for evaluation.

    The store is only read, also while a job trains. Generators stay as they are.

    Args:
        model: as in the job; of a job of several processes, the model that is not sharded.
        store: the directory; a list: the stores of all processes, whose parts are joined.
        tables: as in :class:`cpr_ext.Checkpointer`; None: the embeddings of the model.
        mode: ``"full"`` loads the newest full-recovery point, a single step.
        strict: False loads what matches; the report's ``differences`` list the rest.

    Returns:
        Its step, and which rows are damaged or missing.

    Raises:
        StoreError: it is no store, or of another model; nothing was changed.
        DamageError: no undamaged dense part is left.
        StorageError: a file could not be read; the model may be partly loaded.
    """
    require_model(model)
    require_one_of("mode", mode, ("partial", "full"))
    by_name = isinstance(store, str | os.PathLike)
    stores = [store] if isinstance(store, str | os.PathLike) else list(store)
    if not stores:
        raise UsageError("store is an empty list; needed: the stores of all processes")
    started = time.perf_counter()
    found = find_tables(model) if tables is None else register_tables(tables, ())
    threads = native.ThreadPool(num_threads=min(4, os.cpu_count() or 1))
    live = LiveModel(model, (), {table.name: table for table in found}, threads, direct_io=True)

    def read(readers: list[StoreReader]) -> Findings:
        source = OtherStores(readers, live, mode == "full", by_name, strict, weights_only=True)
        findings = Findings()
        part = source.newest(findings)
        position = read_position(part.tree())
        restore_dense(part, model, (), source.tables, strict=strict, generators=False)
        findings.step, findings.num_samples = position.step, position.num_samples
        findings.extra_state = position.extra_state
        findings.row_updates_lost = 0 if findings.rows_stale == 0 else None
        source.copy_rows(findings)
        for table in found:
            if table.slots is not None:
                settle_slots(table, [(0, table.num_embeddings)], findings)
        return findings

    findings = read_committed_all(stores, read, lambda result: not result.damaged_segments)
    findings.source = StateSource("other stores", ", ".join(map(str, stores)))
    findings.seconds = time.perf_counter() - started
    return findings.report()
