"""What a store holds, at a glance; reads manifests and segment headers only."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from cpr_ext.errors import DamageError
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.position import is_count
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.newest_rows import NewestRows
from cpr_ext.storage.store_reader import StoreReader, open_segment, read_committed
from cpr_ext.tools.maintenance.row_reading import shard_rows


@dataclass(frozen=True)
class Point:
    """A state one can go back to: the newest snapshot, or a full-recovery point.

    Attributes:
        rounding_error: no value of a row differs by more from the one that was captured; 0: rows
            are kept bit for bit. None: not known, a header is damaged.
        is_proven: training has confirmed the full-recovery point, see ``SnapshotHandle.is_proven``.
    """

    snapshot: int
    step: int
    num_samples: int
    is_full_recovery_point: bool
    dense_bytes: int
    rounding_error: float | None = 0.0
    is_proven: bool = False


@dataclass(frozen=True)
class PrecisionSummary:
    """What the newest snapshot's segments keep in one precision.

    Attributes:
        kept_as: "exact", a precision such as "int8", or "row ids".
        file_bytes: without padding.
    """

    kept_as: str
    file_bytes: int


@dataclass(frozen=True)
class ShardSummary:
    """The live segments of a shard; ``newest_step`` is that of its newest captured rows."""

    shard: int
    segments: int
    file_bytes: int
    base_bytes: int
    base_step: int
    newest_step: int


@dataclass(frozen=True)
class TableSummary:
    """A table and, in the newest snapshot, its per-row states (``name dtype row-shape``)."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: str
    row_states: tuple[str, ...]
    row_bytes: int


@dataclass(frozen=True)
class KeysSummary:
    """The keys of a keyed table in the newest snapshot.

    Attributes:
        held: slots that have a key.
        evicted: keys that the snapshot before had, and no slot has any more; None: it was not
            known, as later snapshots had been dropped.
    """

    table: str
    slots: int
    held: int
    evicted: int | None


@dataclass(frozen=True)
class StoreSummary:
    """What a store holds.

    Attributes:
        points: recovery points, newest last; empty: no snapshot was committed as a whole.
        file_bytes: of all live segments, dense parts included.
        precisions: what the newest snapshot's rows take, by precision.
        keys: of keyed tables.
    """

    store: str
    num_shards: int
    points: tuple[Point, ...]
    shards: tuple[ShardSummary, ...]
    tables: tuple[TableSummary, ...]
    file_bytes: int
    precisions: tuple[PrecisionSummary, ...] = ()
    keys: tuple[KeysSummary, ...] = ()


@dataclass(frozen=True)
class TableDetails:
    """How old the rows of a table are in the newest snapshot.

    Attributes:
        steps_behind: how many steps before the newest snapshot rows were captured: of the
            freshest row, at the quartiles, and of the oldest; at least so many for merged rows.
        rows_by_step: captured step -> rows captured then, newest first.
        rows_merged: rows of which compaction kept no step of their own.
    """

    table: TableSummary
    step: int
    steps_behind: tuple[int, int, int, int, int]
    rows_by_step: dict[int, int]
    rows_merged: int = 0


def inspect(store: str | os.PathLike[str]) -> StoreSummary:
    """Summarise a store.

    Raises:
        StoreError: not a store, or a version not known here.
        DamageError: a manifest, or a header of the newest snapshot, is damaged.
    """
    return read_committed(store, _inspect)


def _inspect(reader: StoreReader) -> StoreSummary:
    points = tuple(
        Point(
            *(r.snapshot, r.last_step, r.num_samples, r.is_complete, r.file_bytes),
            _rounding_error(reader, r.snapshot),
            r.is_proven,
        )
        for r in reader.dense.segments
    )
    shards = tuple(
        _summarise_shard(shard, manifest.segments) for shard, manifest in enumerate(reader.shards)
    )
    return StoreSummary(
        store=str(reader.directory),
        num_shards=reader.num_shards,
        points=points,
        shards=shards,
        tables=tuple(_summarise_table(reader, name) for name in reader.tables),
        file_bytes=sum(s.file_bytes for s in shards) + sum(p.dense_bytes for p in points),
        precisions=_summarise_precisions(reader),
        keys=_summarise_keys(reader),
    )


def _rounding_error(reader: StoreReader, snapshot: int) -> float | None:
    try:
        opened = [s for n in range(reader.num_shards) for s in reader.open_live(n, snapshot)]
    except DamageError:
        return None
    return max((segment.rounded.largest_error for segment in opened), default=0.0)


def _summarise_keys(reader: StoreReader) -> tuple[KeysSummary, ...]:
    if not reader.dense.segments or not any(table.keys for table in reader.tables.values()):
        return ()
    segment = open_segment(reader.dense, reader.newest())
    noted = segment.metadata.get("keys")
    found = []
    for name, table in reader.tables.items():
        if not table.keys:
            continue
        counts = noted.get(name) if isinstance(noted, dict) else None
        held, evicted = map((counts if isinstance(counts, dict) else {}).get, ("held", "evicted"))
        if held is None or not (is_count(held) and (evicted is None or is_count(evicted))):
            raise DamageError(f"{segment.path}: its numbers of keys are not as written")
        found.append(KeysSummary(name, table.num_embeddings, held, evicted))
    return tuple(found)


def _summarise_precisions(reader: StoreReader) -> tuple[PrecisionSummary, ...]:
    """Add up what is kept in each precision; shards with a damaged header are left out."""
    sizes: dict[str, int] = {}
    for shard in range(reader.num_shards if reader.dense.segments else 0):
        try:
            opened = reader.open_live(shard, reader.newest().snapshot)
        except DamageError:
            continue
        for segment in opened:
            for kept_as, file_bytes in segment.layout.bytes_by_precision().items():
                sizes[kept_as] = sizes.get(kept_as, 0) + file_bytes
    return tuple(PrecisionSummary(*item) for item in sorted(sizes.items()))


def inspect_table(store: str | os.PathLike[str], table: str) -> TableDetails:
    """Return how old the rows of one table are; reads row ids, no values. Takes 8 bytes per row.

    Raises:
        StoreError: not a store, or it holds no snapshot.
        UsageError: no such table.
        DamageError: a header or row ids are damaged.
    """
    return read_committed(store, lambda reader: _inspect_table(reader, table))


def _inspect_table(reader: StoreReader, table: str) -> TableDetails:
    reader.table(table)
    newest = reader.newest()
    not_after, is_merged = (
        torch.cat(parts)
        for parts in zip(
            *(
                _row_steps(shard_rows(reader, shard, table, newest.snapshot), begin, end)
                for shard in range(reader.num_shards)
                for begin, end in [reader.row_range(table, shard)]
            ),
            strict=True,
        )
    )
    captured, counts = torch.unique(not_after[~is_merged], return_counts=True)
    behind = (newest.last_step - not_after).sort().values
    quartiles = [int(behind[round(q * (len(behind) - 1))]) for q in (0, 0.25, 0.5, 0.75, 1)]
    return TableDetails(
        _summarise_table(reader, table),
        newest.last_step,
        (quartiles[0], quartiles[1], quartiles[2], quartiles[3], quartiles[4]),
        dict(zip(captured.flip(0).tolist(), counts.flip(0).tolist(), strict=True)),
        int(is_merged.sum()),
    )


def _row_steps(rows: NewestRows, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step after which no row was captured, and which rows have none of their own."""
    not_after = torch.full((end - begin,), -1, dtype=torch.int64)
    is_merged = torch.zeros(end - begin, dtype=torch.bool)
    for segment in rows.segments:
        for chunk in segment.chunks_of(rows.table):
            held = segment.row_ids(chunk) - begin
            not_after[held] = segment.segment.chunks[chunk].step
            is_merged[held] = segment.segment.is_merged
    return not_after, is_merged


def _summarise_shard(shard: int, records: tuple[SegmentRecord, ...]) -> ShardSummary:
    bases = [record for record in records if record.kind == "base"]
    return ShardSummary(
        shard=shard,
        segments=len(records),
        file_bytes=sum(record.file_bytes for record in records),
        base_bytes=sum(record.file_bytes for record in bases),
        base_step=max((record.last_step for record in bases), default=-1),
        newest_step=max((record.last_step for record in records), default=-1),
    )


def _summarise_table(reader: StoreReader, name: str) -> TableSummary:
    table = reader.table(name)
    states: tuple[str, ...] = ()
    row_bytes = table.embedding_dim * table.dtype.itemsize
    shard = next(s for s in range(reader.num_shards) if len(range(*reader.row_range(name, s))))
    if reader.dense.segments:
        arrays = shard_rows(reader, shard, name, reader.newest().snapshot).arrays
        states = tuple(
            " ".join([a.name, DTYPE_NAMES[a.dtype], *("x".join(map(str, a.row_shape)).split())])
            for a in arrays
            if a.name != "weight"
        )
        row_bytes = sum(array.row_bytes for array in arrays)
    return TableSummary(
        name, table.num_embeddings, table.embedding_dim, DTYPE_NAMES[table.dtype], states, row_bytes
    )
