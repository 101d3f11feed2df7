"""Take the state of another store, whatever its shards, into a live model.

The other store is only read. Rows are copied block by block, and only chunks that hold a wanted row
are read. A model that differs is refused with the list of differences, or what matches is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.damage_accounting import Source, account, needs_account
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.recovery.restore import newest_readable_dense, no_dense_part
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.table import Table
from cpr_ext.state.wrapper_names import match_names
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.newest_rows import ShardRows
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import StoreReader, open_segment

BLOCK_BYTES = 16 << 20
Ranges = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class TableMatch:
    """Which tables of a store fit a model.

    Attributes:
        names: of tables whose rows can be taken: dim and dtype fit, and the model's has at least
            as many rows. The live name by the store's, which wrappers may have made another.
        differences: every one there is, one sentence each; empty: the tables are the same.
    """

    names: Mapping[str, str]
    differences: tuple[str, ...]


def match_tables(reader: StoreReader, tables: Sequence[Table]) -> TableMatch:
    """Compare the tables of a store with those of a model."""
    live = {table.name: table for table in tables}
    matched = match_names(reader.tables, live)
    names: dict[str, str] = {}
    differences = []
    for name in sorted(reader.tables.keys() | (live.keys() - matched.values())):
        if name not in matched:
            where = "model" if name in reader.tables else "store"
            differences.append(f"table '{name}' is not in the {where}")
            continue
        old, new = reader.tables[name], live[matched[name]]
        pairs = (
            ("num_embeddings", old.num_embeddings, new.num_embeddings),
            ("embedding_dim", old.embedding_dim, new.embedding_dim),
            ("dtype", old.dtype, new.weight.dtype),
        )
        found = [(what, a, b) for what, a, b in pairs if a != b]
        differences += [f"table '{name}' has {what} {a}, the model {b}" for what, a, b in found]
        same_rows = (old.embedding_dim, old.dtype) == (new.embedding_dim, new.weight.dtype)
        if same_rows and old.num_embeddings <= new.num_embeddings:
            names[name] = new.name
    return TableMatch(names, tuple(differences))


class Target(Protocol):
    """What takes rows of one table of a store."""

    def takes(self, array: ArraySpec, skipped: dict[str, None]) -> bool:
        """True if it has a place for such an array; else why not is added to ``skipped``."""

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        """Take rows ``row_ids`` (n,), as numbered in the store: ``values`` (n, ...)."""


class TableTarget:
    """A live table that takes rows as they are numbered in the store."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def takes(self, array: ArraySpec, skipped: dict[str, None]) -> bool:
        """See :class:`Target`."""
        return _fits(array, self._table, skipped)

    def put(self, array: str, row_ids: torch.Tensor, values: torch.Tensor) -> None:
        """See :class:`Target`."""
        target = self._table.arrays()[array]
        target[row_ids.to(target.device)] = values.to(target.device)


def transplant_rows(
    reader: StoreReader,
    snapshot: int,
    targets: Mapping[str, Target],
    ranges: Ranges,
    report: RecoveryReport,
    *,
    direct_io: bool = True,
) -> list[str]:
    """Copy rows of a store's snapshot into live tables.

    Args:
        targets: by name of the store's table.
        snapshot: the number of the snapshot, one that the store committed as a whole.
        ranges: rows [begin, end) to take of each table; those the store lacks stay as they are.
        report: counts are added to it. Where something is damaged, rows fall back to their older
            state.

    Returns:
        Per-row states of the store that do not fit the model's and were not taken, one sentence
        each.
    """
    skipped: dict[str, None] = {}
    for shard in range(reader.num_shards):
        wanted = {
            name: (max(begin, held[0]), min(end, held[1]))
            for name, (begin, end) in ranges.items()
            for held in [reader.row_range(name, shard)]
            if max(begin, held[0]) < min(end, held[1])
        }
        if not wanted:
            continue
        sources = _open_sources(reader, shard, snapshot, report, direct_io)
        segments = [source.rows for source in sources if source.rows is not None]
        for name, (begin, end) in wanted.items():
            rows = ShardRows(name, segments, on_damage=_Damages(report, sources))
            _copy(rows, targets[name], begin, end, report, skipped)
        if needs_account(sources):
            account(wanted, sources, report)
        report.segments_read += len(segments)
        report.bytes_read += sum(segment.bytes_read for segment in segments)
    return list(skipped)


@dataclass
class _Damages:
    """Takes note of damaged chunks; each is met once per block, and counted once."""

    report: RecoveryReport
    sources: Sequence[Source]

    def __call__(self, path: Path, chunk: int, num_rows: int, error: DamageError) -> None:
        (source,) = (s for s in self.sources if s.rows and s.rows.segment.path == path)
        if chunk not in source.damaged:
            source.damaged.add(chunk)
            self.report.add_damaged(path, type(error)(f"chunk {chunk}: {error}"), num_rows)


def _open_sources(
    reader: StoreReader, shard: int, snapshot: int, report: RecoveryReport, direct_io: bool
) -> list[Source]:
    manifest = reader.shards[shard]
    ranges = {name: reader.row_range(name, shard) for name in reader.tables}
    opened = []
    for record in manifest.segments:
        if record.snapshot > snapshot:
            continue
        try:
            segment = open_segment(manifest, record)
            rows = SegmentRows(segment, ranges, direct_io=direct_io)
            opened.append(Source(record, rows))
        except DamageError as error:
            report.add_damaged(manifest.path_of(record), error)
            opened.append(Source(record, None))
    return opened


def _copy(
    rows: ShardRows,
    target: Target,
    begin: int,
    end: int,
    report: RecoveryReport,
    skipped: dict[str, None],
) -> None:
    taken = [array.name for array in rows.arrays if target.takes(array, skipped)]
    block_rows = max(1, BLOCK_BYTES // max(1, sum(array.row_bytes for array in rows.arrays)))
    for first in range(begin, end, block_rows):
        block = rows.range(first, min(first + block_rows, end))
        held = block.steps >= 0
        report.rows_restored += int(held.sum())
        for name in taken:
            target.put(name, block.row_ids[held], block.arrays[name][held])


def _fits(array: ArraySpec, table: Table, skipped: dict[str, None]) -> bool:
    """True if the model has, or its optimizer can be given, such an array."""
    live = table.arrays().get(array.name)
    if live is None and table.optimizer is None:
        skipped[f"'{table.name}/{array.name}' has no optimizer in the model"] = None
        return False
    if live is None:
        table.make_row_state(array.name, array.row_shape, array.dtype)
        return True
    stored, wanted = (array.dtype, array.row_shape), (live.dtype, tuple(live.shape[1:]))
    if stored != wanted:
        text = f"'{table.name}/{array.name}' has {_kind(*stored)}, the model {_kind(*wanted)}"
        skipped[text] = None
    return stored == wanted


def stored_arrays(reader: StoreReader, snapshot: int) -> dict[str, dict[str, ArraySpec]]:
    """The weight and per-row states that a store's readable segments hold, by table and name."""
    found: dict[str, dict[str, ArraySpec]] = {}
    for shard in range(reader.num_shards):
        sources = _open_sources(reader, shard, snapshot, RecoveryReport(), False)
        for rows in (source.rows for source in sources if source.rows is not None):
            for spec in rows.segment.layout.tables:
                if spec.name in reader.tables:
                    arrays = found.setdefault(spec.name, {})
                    arrays.update({array.name: array for array in spec.arrays})
    return found


def row_state_differences(
    reader: StoreReader, snapshot: int, tables: Mapping[str, Table]
) -> list[str]:
    """Per-row states of the store that do not fit the model's; changes nothing."""
    found: dict[str, None] = {}
    for name, arrays in stored_arrays(reader, snapshot).items():
        if (table := tables.get(name)) is None:
            continue
        live = table.arrays()
        for array in arrays.values():
            if table.optimizer is None or array.name in live:
                _fits(array, table, found)
    return list(found)


def _kind(dtype: torch.dtype, row_shape: tuple[int, ...]) -> str:
    return f"dtype {dtype} and rows of shape {row_shape}"


def refuse_differences(reader: StoreReader, differences: Sequence[str]) -> None:
    """Raise StoreError with all differences, if there are any."""
    if differences:
        raise StoreError(
            f"'{reader.directory}' holds another model: {'; '.join(differences)}. Build the model "
            "that the store was made with, or take what matches with recover(strict=False)"
        )


def newest_undamaged(
    reader: StoreReader, *, full: bool, report: RecoveryReport
) -> tuple[SegmentRecord, DensePart]:
    """The newest snapshot (``full``: full-recovery point) whose dense part can be read.

    Raises:
        StoreError: the store holds none.
        DamageError: none is undamaged.
    """
    reader.newest(full=full)
    candidates = [r for r in reader.dense.segments if r.is_complete or not full]
    found = newest_readable_dense(reader.dense, candidates, report)
    if found is None:
        raise no_dense_part(report)
    return found
