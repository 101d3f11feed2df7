"""What a store holds, at a glance; reads manifests and segment headers only."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cpr_ext.errors import DamageError
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.position import is_count
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.store_reader import StoreReader, read_committed
from cpr_ext.wings.tools.maintenance.row_reading import rows_of


@dataclass(frozen=True)
class Point:
    """A state one can go back to: the newest snapshot, or a full-recovery point.

    Attributes:
        is_rounded: some of its rows are kept in fewer bits; None: not known, a header is damaged.
    """

    snapshot: int
    step: int
    num_samples: int
    is_full_recovery_point: bool
    dense_bytes: int
    is_rounded: bool | None = False


@dataclass(frozen=True)
class RowsSummary:
    """The live segments of rows; ``newest_step`` is that of the newest captured rows; -1: none."""

    segments: int
    file_bytes: int
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
        keys: of keyed tables.
    """

    store: str
    points: tuple[Point, ...]
    rows: RowsSummary
    tables: tuple[TableSummary, ...]
    file_bytes: int
    keys: tuple[KeysSummary, ...] = ()


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
            is_rounded,
        )
        for r, is_rounded in zip(reader.manifest.dense, _are_rounded(reader), strict=True)
    )
    rows = _summarise_rows(reader.manifest.rows)
    return StoreSummary(
        store=str(reader.directory),
        points=points,
        rows=rows,
        tables=tuple(_summarise_table(reader, name) for name in reader.tables),
        file_bytes=rows.file_bytes + sum(point.dense_bytes for point in points),
        keys=_summarise_keys(reader),
    )


def _are_rounded(reader: StoreReader) -> list[bool | None]:
    """Return whether each point has rounded rows; None: a header of it is damaged."""
    own = {record: _is_rounded(reader, record) for record in reader.manifest.rows}
    found: list[bool | None] = []
    for point in reader.manifest.dense:
        of_point = {own[record] for record in reader.manifest.at(point.snapshot)}
        found.append(None if None in of_point else True in of_point)
    return found


def _is_rounded(reader: StoreReader, record: SegmentRecord) -> bool | None:
    try:
        return reader.open(record).is_rounded
    except DamageError:
        return None


def _summarise_keys(reader: StoreReader) -> tuple[KeysSummary, ...]:
    if not reader.manifest.dense or not any(table.keys for table in reader.tables.values()):
        return ()
    segment = reader.open(reader.newest())
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


def _summarise_rows(records: tuple[SegmentRecord, ...]) -> RowsSummary:
    bases = [record for record in records if record.kind == "base"]
    return RowsSummary(
        segments=len(records),
        file_bytes=sum(record.file_bytes for record in records),
        base_step=max((record.last_step for record in bases), default=-1),
        newest_step=max((record.last_step for record in records), default=-1),
    )


def _summarise_table(reader: StoreReader, name: str) -> TableSummary:
    table = reader.table(name)
    states: tuple[str, ...] = ()
    row_bytes = table.embedding_dim * table.dtype.itemsize
    if reader.manifest.dense:
        arrays = rows_of(reader, name, reader.newest().snapshot).arrays
        states = tuple(
            " ".join([a.name, DTYPE_NAMES[a.dtype], *("x".join(map(str, a.row_shape)).split())])
            for a in arrays
            if a.name != "weight"
        )
        row_bytes = sum(array.row_bytes for array in arrays)
    return TableSummary(
        name, table.num_embeddings, table.embedding_dim, DTYPE_NAMES[table.dtype], states, row_bytes
    )
