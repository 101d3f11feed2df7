"""Check every byte of segments, and that they hold what a store of these tables holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.restore import missing_states, read_dense
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_format import ArraySpec
from cpr_ext.storage.segment_reader import RowRanges, SegmentRows
from cpr_ext.storage.store_reader import StoreReader


def check_segment(
    reader: StoreReader, record: SegmentRecord, wanted: Sequence[RowRanges] | None = None
) -> None:
    """Read a segment, as :func:`checked_pieces`."""
    for _ in checked_pieces(reader, record, wanted):
        pass


def checked_pieces(
    reader: StoreReader, record: SegmentRecord, wanted: Sequence[RowRanges] | None = None
) -> Iterator[int]:
    """Read a segment, chunk by chunk; yield the bytes read since the last time.

    Args:
        wanted: only chunks that may hold one of these rows; None: all.

    Raises:
        DamageError: names it and what is wrong with it.
        StorageError: it could not be read.
    """
    if record.kind == "dense":
        read_dense(reader, record, direct_io=False)
        yield record.file_bytes
        return
    segment = reader.open(record)
    ranges = reader.manifest.model.row_ranges
    rows = SegmentRows(segment, ranges)
    yield rows.bytes_read
    for spec in segment.layout.tables:
        table, (begin, end) = reader.tables[spec.name], ranges[spec.name]
        weights = [array for array in spec.arrays if array.name == WEIGHT]
        if [(a.dtype, a.row_shape) for a in weights] != [(table.dtype, (table.embedding_dim,))]:
            raise DamageError(f"{segment.path}: '{spec.name}' is not as in {MANIFEST_FILE}")
        if record.kind == "base" and (spec.range_begin, spec.num_rows) != (begin, end - begin):
            raise DamageError(f"{segment.path}: this base lacks rows of '{spec.name}'")
        last_row = -1
        for chunk in rows.chunks_of(spec.name):
            if wanted is not None and not any(rows.may_hold(chunk, each) for each in wanted):
                continue
            before = rows.bytes_read
            row_ids = rows.rows(chunk).row_ids
            if int(row_ids[0]) <= last_row:
                raise DamageError(f"{segment.path}: row ids of '{spec.name}' do not ascend")
            last_row = int(row_ids[-1])
            yield rows.bytes_read - before


def refusal(reader: StoreReader, records: Sequence[SegmentRecord]) -> str | None:
    """Return why ``recover()`` would not take sound segments of rows; None: it would.

    Segments that are damaged are not its concern: :func:`check_segment` names them.
    """
    weights = {
        name: {WEIGHT: ArraySpec(WEIGHT, table.dtype, (table.embedding_dim,))}
        for name, table in reader.tables.items()
    }
    with suppress(DamageError):  # of a header: check_segment names it
        segments = [reader.open(record) for record in records]
        known = [s for s in segments if all(t.name in weights for t in s.layout.tables)]
        try:
            missing_states(known, weights)
        except DamageError:
            raise
        except StoreError as error:
            return str(error)
    return None


def damage(reader: StoreReader, wanted: Sequence[RowRanges] | None = None) -> Iterator[str]:
    """Read all that is live; yield what is wrong with it, one sentence each.

    Args:
        wanted: only these rows, see :func:`checked_pieces`; None: everything.

    Raises:
        StorageError: something could not be read.
    """
    manifest = reader.manifest
    for record in manifest.records() if wanted is None else manifest.rows:
        try:
            check_segment(reader, record, wanted=wanted)
        except DamageError as error:
            yield str(error)
    if (reason := refusal(reader, manifest.rows)) is not None:
        yield reason


def refuse_damage(reader: StoreReader, wanted: Sequence[RowRanges] | None = None) -> None:
    """Read all that is live of a store, or some rows; memory is bounded by one chunk.

    Raises:
        DamageError: names everything that is damaged.
        StorageError: something could not be read.
    """
    if found := list(damage(reader, wanted)):
        raise DamageError(
            f"{len(found)} file(s) are damaged and nothing was changed: {'; '.join(found)}. Put "
            'them back from a copy, or recover(on_damage="fall_back"), which takes the newest '
            "undamaged state of each row and reports what is older"
        )
