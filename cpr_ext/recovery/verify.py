"""Check every byte of segments, and that they hold what a store of these tables holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.restore import missing_states, read_dense
from cpr_ext.state.table import WEIGHT, shard_row_range
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retries import UnreadableError
from cpr_ext.storage.segment_format import ArraySpec, TableSpec
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import StoredTable, open_segment

_ANY_ROW = (0, 2**62)
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Expected:
    """What the segments of a shard must fit.

    Attributes:
        tables: as in STORE.json; None: it is damaged, so that only checksums can be checked.
        ranges: rows [begin, end) of the shard, by table.
    """

    tables: Mapping[str, StoredTable] | None
    ranges: Mapping[str, tuple[int, int]]


def expect(tables: Mapping[str, StoredTable] | None, shard: int, num_shards: int) -> Expected:
    """Return what a shard of a store of these tables holds."""
    return Expected(
        tables,
        {
            name: shard_row_range(table.num_embeddings, shard, num_shards)
            for name, table in (tables or {}).items()
        },
    )


def check_dense(manifest: Manifest, record: SegmentRecord) -> None:
    """Read a dense part; raises DamageError, naming it, if any byte is not as committed."""
    read_dense(manifest, record, direct_io=False)


def check_rows(
    manifest: Manifest,
    record: SegmentRecord,
    expected: Expected,
    on_bytes: OnBytes = lambda size_bytes: None,
) -> None:
    """Read a segment of a shard, chunk by chunk.

    Args:
        on_bytes: called with the bytes read since the last call.

    Raises:
        DamageError: names it and what is wrong with it.
    """
    segment = open_segment(manifest, record)
    specs, tables = segment.layout.tables, expected.tables
    held = {spec.name: _ANY_ROW for spec in specs} if tables is None else dict(expected.ranges)
    rows = SegmentRows(segment, held)
    on_bytes(rows.bytes_read)
    for spec in specs:
        if tables is not None:
            table = tables[spec.name]
            weights = [array for array in spec.arrays if array.name == WEIGHT]
            if [(a.dtype, a.row_shape) for a in weights] != [(table.dtype, (table.embedding_dim,))]:
                raise DamageError(f"{segment.path}: '{spec.name}' is not as in STORE.json")
        if record.kind == "base" and (spec.range_begin is None or _holds_less(spec, held)):
            raise DamageError(f"{segment.path}: this base lacks rows of '{spec.name}'")
        last_row = -1
        for chunk in rows.chunks_of(spec.name):
            before = rows.bytes_read
            row_ids = rows.rows(chunk).row_ids
            if int(row_ids[0]) <= last_row:
                raise DamageError(f"{segment.path}: row ids of '{spec.name}' do not ascend")
            last_row = int(row_ids[-1])
            on_bytes(rows.bytes_read - before)


def _holds_less(spec: TableSpec, held: Mapping[str, tuple[int, int]]) -> bool:
    begin, end = held[spec.name]
    return (begin, end) != _ANY_ROW and spec.num_rows != end - begin


def refusal(manifest: Manifest, newest_snapshot: int, expected: Expected) -> str | None:
    """Return why ``recover()`` would not take sound segments of a shard; None: it would.

    Segments that are damaged are not its concern: :func:`check_rows` names them.
    """
    records = [r for r in manifest.segments if r.snapshot <= newest_snapshot]
    has_rows = any(begin < end for begin, end in expected.ranges.values())
    if has_rows and not any(record.kind == "base" for record in records):
        return f"no base segment, although the store holds snapshot {newest_snapshot}"
    if expected.tables is None:
        return None
    weights = {
        name: {WEIGHT: ArraySpec(WEIGHT, table.dtype, (table.embedding_dim,))}
        for name, table in expected.tables.items()
    }
    with suppress(DamageError):  # of a header: check_rows names it
        segments = [open_segment(manifest, record) for record in records]
        known = [s for s in segments if all(t.name in weights for t in s.layout.tables)]
        try:
            missing_states(known, weights)
        except DamageError:
            raise
        except StoreError as error:
            return str(error)
    return None


def refuse_damage(
    dense: Manifest | None,
    shards: Mapping[int, Manifest],
    tables: Mapping[str, StoredTable],
    num_shards: int,
) -> None:
    """Read all that is live of these directories; memory is bounded by one chunk.

    Raises:
        DamageError: names everything that is damaged.
        StorageError: something could not be read, and recovery is not to fall back.
    """
    found: list[str] = []
    if dense is not None:
        found += _damage_in(dense, partial(check_dense, dense))
    for shard, manifest in shards.items():
        expected = expect(tables, shard, num_shards)
        found += _damage_in(manifest, partial(check_rows, manifest, expected=expected))
        if dense and dense.segments:
            reason = refusal(manifest, dense.segments[-1].snapshot, expected)
            found += [f"{manifest.directory / MANIFEST_FILE}: {reason}"] if reason else []
    if found:
        raise DamageError(
            f"{len(found)} file(s) are damaged and nothing was changed: {'; '.join(found)}. Put "
            'them back from a copy, or recover(on_damage="fall_back"), which takes the newest '
            "undamaged state of each row and reports what is older"
        )


def _damage_in(manifest: Manifest, check: Callable[[SegmentRecord], None]) -> Iterator[str]:
    for record in manifest.segments:
        try:
            check(record)
        except UnreadableError:
            continue  # recovery falls back, and reports it
        except DamageError as error:
            yield str(error)
