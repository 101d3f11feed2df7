"""Recovery of a model in training: of lost shards, or of everything from any source.

A recovery finds a usable dense part, refuses another model, and only then changes the live one. It
restores the dense part, copies and accounts for the rows, and rolls the store back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import LiveModel
from cpr_ext.recovery.sources import ModelSource, OtherStores, OwnStore, RowsSource
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart, restore_dense
from cpr_ext.state.position import Position
from cpr_ext.state.slot_keys import EMPTY, repeated
from cpr_ext.state.stateful import Declared
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tracking.key_watch import KeyWatch
from cpr_ext.tracking.lookup_recorder import LookupRecorder

_LIVE, _NEWEST, _OLDER = 2, 1, 0


def settle_slots(
    table: Table, restored: Iterable[tuple[int, int]], findings: RecoveryReport
) -> torch.Tensor:
    """Empty the slots of a keyed table whose key another slot has with more right.

    So are slots that are missing, and those with a number that is no key.

    Args:
        restored: the ranges [begin, end) of slots that were restored; all others are live.
        findings: ``rows_of_other_ids`` is counted.

    Returns:
        (n,) int64, the slots that were emptied.
    """
    assert table.slots is not None
    key = table.slots.key.cpu()
    rank = torch.full((len(key),), _LIVE, dtype=torch.int8)
    for begin, end in restored:
        rank[begin:end] = _NEWEST
    rank[findings.not_newest(table.name)] = _OLDER
    invalid = torch.nonzero(key < EMPTY).flatten()
    missing = findings.missing_rows.get(table.name, invalid[:0])
    others = torch.unique(torch.cat([_losers(key, rank), invalid]))
    others = others[~torch.isin(others, missing)]
    findings.rows_of_other_ids += len(others)
    emptied: torch.Tensor = torch.unique(torch.cat([others, missing]))
    _empty(table, emptied)
    table.slots.rebuild()
    return emptied


def _losers(key: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return the slots of each key that has several, but for one that ranks above all others."""
    slots = repeated(key, torch.arange(len(key)))
    slots = slots[torch.argsort(rank[slots], stable=True)]
    slots = slots[torch.argsort(key[slots], stable=True)]
    keys, ranks = key[slots], rank[slots]
    wins = torch.ones(len(slots), dtype=torch.bool)
    wins[:-1] = keys[:-1] != keys[1:]  # the last of a key ranks highest
    wins[1:] &= ranks[1:] > ranks[:-1]
    return slots[~wins]


def _empty(table: Table, slots: torch.Tensor) -> None:
    assert table.slots is not None
    with torch.no_grad():
        for array in table.arrays().values():
            array[slots.to(array.device)] = 0
        table.slots.key[slots.to(table.slots.key.device)] = EMPTY


RecoveryMode = Literal["partial", "full"]
OnDamage = Literal["raise", "fall_back"]


class Recoverer:
    """Restores a live model, its optimizers and the trackers of its rows.

    No snapshot may be in flight and no manifest may change while one of its methods runs. Each
    returns its findings, of which its caller builds the report.

    Args:
        num_shards: into how many row ranges each table is cut.
        trackers: by table name; restored rows are taken from them, since they equal the saved ones.
        recorder: it drops lookups of steps that a recovery reverts.
        keys: learns which keys are as saved.
        threads: the pool that scatters rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        store: Store,
        num_shards: int,
        trackers: Mapping[str, native.RowTracker],
        recorder: LookupRecorder,
        keys: KeyWatch,
        threads: native.ThreadPool,
        *,
        direct_io: bool,
        declared: Declared,
    ) -> None:
        by_name = {table.name: table for table in tables}
        self._live = LiveModel(model, optimizers, by_name, threads, direct_io, declared)
        self._store = store
        self._num_shards = num_shards
        self._trackers = trackers
        self._recorder = recorder
        self._keys = keys
        #: Of the dense part that was restored last.
        self.position = Position(0, 0, {})

    @property
    def tables(self) -> Collection[Table]:
        """The live tables."""
        return self._live.tables.values()

    def recover_shards(
        self,
        shards: Sequence[int],
        *,
        step: int,
        num_samples: int,
        on_damage: OnDamage,
        counts_are_exact: Callable[[Table, int, int], bool],
    ) -> RecoveryReport:
        """Restore the rows of shards of a live model, and nothing else.

        Args:
            step, num_samples: where training is, and stays.
            counts_are_exact: whether of rows [begin, end) of a table just those that have changed
                since they were saved are dirty. Else nobody knows how many are lost.

        Raises:
            DamageError: ``on_damage="raise"`` and a file of these shards is damaged.
        """
        wanted = [
            {t.name: shard_rows(t, run, self._num_shards) for t in self.tables}
            for run in _runs(shards)
        ]
        source: RowsSource = OwnStore(self._store, self._live, wanted)
        if on_damage == "raise":
            source.refuse_damage()
        self._begin_restore()
        findings = RecoveryReport(step, num_samples, tuple(shards))
        for tracker, table, begin, end in self._tracked(shards):
            if table.updates_only_looked_up_rows() and counts_are_exact(table, begin, end):
                findings.add_stale(tracker.num_dirty(begin, end))
                has_counts = hasattr(tracker, "sum_counts")  # of updates since a row was captured
                lost = tracker.sum_counts(begin, end) if has_counts else None
                findings.add_lost_updates(lost)
            elif begin < end:
                findings.rows_stale = findings.row_updates_lost = None
        source.copy_rows(findings)
        self._settle_slots(shards, findings)
        if findings.damaged_segments:
            # Rows that changed since they were saved, and are older or missing now, count once.
            for tracker, table, begin, end in self._tracked(shards):
                dirty = torch.as_tensor(tracker.dirty_rows(begin, end))
                twice = torch.isin(findings.not_newest(table.name), dirty)
                findings.add_stale(-int(twice.sum()))
        self._take_rows(shards)
        return findings

    def recover_all(
        self,
        mode: RecoveryMode,
        *,
        steps_done: int,
        on_damage: OnDamage,
        up_to_step: int | None = None,
        at_step: int | None = None,
    ) -> RecoveryReport:
        """Restore every shard and the dense part, and roll the store back to them.

        Args:
            up_to_step: what was saved at a later step is as if it were not there.
            at_step: go back to the full-recovery point of this step.
            steps_done: steps that the live model was trained; with some, an empty store is refused.

        Returns:
            What was restored; all zero if the store is empty.

        Raises:
            DamageError: no undamaged dense part is left, or ``on_damage="raise"`` and any file of
                the store is damaged.
        """
        source = OwnStore(
            self._store, self._live, None, mode == "full", up_to_step, at_step, steps_done
        )
        return self._recover(source, on_damage=on_damage, strict=True)

    def recover_from(
        self,
        readers: Sequence[StoreReader],
        mode: RecoveryMode,
        *,
        by_name: bool,
        strict: bool,
        on_damage: OnDamage,
    ) -> RecoveryReport:
        """Restore everything from other stores, which are only read.

        Args:
            by_name: from one store, whose tables have the names of the live ones; else from the
                stores of processes that each held parts of the tables.

        Raises:
            StoreError: the model is another one, the stores together do not hold what it needs, or
                they hold no such snapshot.
            DamageError: as :meth:`recover_all`.
        """
        source = OtherStores(readers, self._live, mode == "full", by_name, strict)
        return self._recover(source, on_damage=on_damage, strict=strict)

    def _recover(self, source: ModelSource, *, strict: bool, on_damage: OnDamage) -> RecoveryReport:
        """Recover a whole model: the path of every source."""
        if on_damage == "raise":
            source.refuse_damage()
        self._begin_restore()
        live, findings = self._live, RecoveryReport(shards=tuple(range(self._num_shards)))
        part, position = source.newest(findings), Position(0, 0, {})
        if part is not None:
            position = read_position(part.tree())
            restore_dense(
                part,
                live.model,
                live.optimizers,
                source.tables,
                strict=strict,
                declared=live.declared,
                keep=live.declared.own if source.is_of_job else (),
            )
            if source.is_of_job:
                shared = live.declared.shared_values(position.values)
                position = replace(position, values=shared)
            findings.differences = [*findings.differences, *self._warn_of_state(part, source)]
        self.position = position
        self._recorder.forget()
        findings.step, findings.num_samples = position.step, position.num_samples
        findings.state = position.values
        findings.row_updates_lost = 0 if findings.rows_stale == 0 else None
        if part is not None:
            source.copy_rows(findings)
            self._settle_slots(findings.shards, findings)
            self._take_rows(findings.shards)
        if position.rows_unsaved and (findings.older_rows or findings.missing_rows):
            # Rows that damage made older, or took, may be among those that were not saved anyway.
            findings.rows_stale = None
        if findings.damaged_segments or findings.differences:
            findings.is_complete = False
        self._store.roll_back(source.snapshot)
        return findings

    def _begin_restore(self) -> None:
        for table in self.tables:
            table.begin_restore()

    def _warn_of_state(self, part: DensePart, source: ModelSource) -> list[str]:
        """Warn of declared state that is not restored, and return the differences."""
        declared, texts = self._live.declared, []
        if declared.objects and not part.tree().get("state"):
            texts.append(
                f"the snapshot holds no state of {[*declared.objects]}: it was made without "
                "state=. They keep the state that they have now, and the next snapshot saves it"
            )
        if source.is_of_job and declared.own:
            texts.append(
                "PerRank state is not taken from the stores of other processes: which of them "
                "it would belong to is not known. It stays as it is now"
            )
        for text in texts:
            warnings.warn(text, UntrackedChangeWarning, stacklevel=6)
        return texts

    def _settle_slots(self, shards: Sequence[int], findings: RecoveryReport) -> None:
        """See to it that no slot of a keyed table has a row under another id."""
        for table in self.tables:
            if table.slots is None:
                continue
            ranges = [
                shard_row_range(table.num_embeddings, shard, self._num_shards) for shard in shards
            ]
            emptied = settle_slots(table, ranges, findings)
            for begin, end in ranges:
                inside = emptied[(emptied >= begin) & (emptied < end)]
                self._keys.note_restored(table, begin, end, inside)

    def _take_rows(self, shards: Sequence[int]) -> None:
        """Restored rows are as saved: not dirty, and their change is measured from here."""
        for tracker, table, begin, end in self._tracked(shards):
            tracker.take_range(begin, end, weight=table.weight)

    def _tracked(self, shards: Sequence[int]) -> Iterator[tuple[Any, Table, int, int]]:
        """Yield each table's tracker, the table, and its rows [begin, end), for shards in a row."""
        for table in self._live.tables.values():
            for run in _runs(shards):
                yield self._trackers[table.name], table, *shard_rows(table, run, self._num_shards)


def shard_rows(table: Table, run: tuple[int, int], num_shards: int) -> tuple[int, int]:
    """Return rows [begin, end) of a table that the shards from the first to the last hold."""
    begin, _ = shard_row_range(table.num_embeddings, run[0], num_shards)
    return begin, shard_row_range(table.num_embeddings, run[1], num_shards)[1]


def _runs(shards: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and the last of those that follow one another."""
    runs: list[tuple[int, int]] = []
    for shard in sorted(set(shards)):
        if runs and runs[-1][1] == shard - 1:
            runs[-1] = runs[-1][0], shard
        else:
            runs.append((shard, shard))
    return runs
