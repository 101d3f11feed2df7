"""Merge neighbouring segments of a shard into one, with bounded memory, and put it in their place.

Two steps, so that a manifest has one writer at a time. :func:`write_merged` reads and writes for as
long as it takes and changes nothing that is live. :func:`commit_merged` replaces the manifest. A
crash between them leaves a file that nothing names, which the next writer removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.merge_plan import Merge
from cpr_ext.storage.newest_rows import NewestRows
from cpr_ext.storage.rounded_chunks import RoundedRows, RoundedTally
from cpr_ext.storage.segment_format import Committed, TableSpec, most_rounded
from cpr_ext.storage.segment_history import CHAINS, merged_chains
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.segment_writer import Pace, SegmentStream, rows_per_chunk
from cpr_ext.storage.store_reader import open_segment, require_all_rows
from cpr_ext.storage.stored_rows import StoredBlock, merged_arrays, newest_stored

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class MergeLimits:
    """How much a merge may take.

    Attributes:
        block_bytes: rows in memory at a time; the row ids of partial segments come on top.
        chunk_bytes: of a chunk in the merged segment.
        bytes_per_second: read and written together; None: no limit.
    """

    block_bytes: int = BLOCK_BYTES
    chunk_bytes: int = CHUNK_BYTES
    bytes_per_second: float | None = None


@dataclass(frozen=True)
class Merged:
    """A merged segment, durable but not live yet."""

    merge: Merge
    record: SegmentRecord
    bytes_read: int


def write_merged(
    manifest: Manifest,
    shard: int,
    row_ranges: Mapping[str, tuple[int, int]],
    merge: Merge,
    limits: MergeLimits,
    pace: Pace,
) -> Merged:
    """Write the segment that holds the newest state of every row of ``merge.read``.

    Args:
        row_ranges: rows [begin, end) of each table that the shard holds.

    Raises:
        DamageError: a source is damaged; names it. Nothing live was changed.
        StorageError: the operating system refused, for example because the disk is full.
        SnapshotError: ``pace`` was stopped.
    """
    opened = [open_segment(manifest, record) for record in merge.read]
    sources = [SegmentRows(segment, dict(row_ranges)) for segment in opened]
    tables = {
        name: NewestRows(name, sources)
        for name in row_ranges
        if any(s.table(name) for s in sources)
    }
    ids = {
        name: None if merge.kind == "base" else rows.all_row_ids() for name, rows in tables.items()
    }
    specs = _specs(row_ranges, tables, ids, has_base=merge.kind == "base")
    if merge.kind == "base":
        require_all_rows(opened[0], row_ranges)
    pace.spend(sum(source.bytes_read for source in sources))
    tally = RoundedTally()
    with SegmentStream(
        manifest.directory,
        snapshot=merge.snapshot,
        kind=merge.kind,
        tables=specs,
        metadata={
            "shard": shard,
            "merged_from": [record.file for record in merge.read],
            CHAINS: merged_chains(merge.read, opened),
            **RoundedRows.together([segment.rounded for segment in opened]).to_note(),
        },
        chunk_bytes=limits.chunk_bytes,
        pace=pace,
        row_ids=[ids[spec.name] for spec in specs],
    ) as stream:
        for index, spec in enumerate(specs):
            rows = tables[spec.name]
            copy_table(rows, index, spec, ids[spec.name], stream, limits, pace, tally)
        record = stream.finish(
            _committed(merge),
            rounded=most_rounded(tally, opened),
        )
    return Merged(merge, record, sum(source.bytes_read for source in sources))


def _committed(merge: Merge) -> Committed:
    return Committed(
        first_step=min(record.first_step for record in merge.read),
        last_step=max(record.last_step for record in merge.read),
        num_samples=merge.sources[-1].num_samples,
        chain_before=merge.sources[0].chain_before,
        merged_chain=merge.sources[-1].chain,
    )


def _specs(
    row_ranges: Mapping[str, tuple[int, int]],
    tables: Mapping[str, NewestRows],
    ids: Mapping[str, torch.Tensor | None],
    *,
    has_base: bool,
) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(
            name,
            end - begin if (held := ids[name]) is None else len(held),
            begin if held is None else None,
            merged_arrays(name, rows.arrays, rows.segments, has_base=has_base),
        )
        for name, rows in tables.items()
        for begin, end in [row_ranges[name]]
    )


def copy_table(
    rows: NewestRows,
    index: int,
    spec: TableSpec,
    row_ids: torch.Tensor | None,
    stream: SegmentStream,
    limits: MergeLimits,
    pace: Pace,
    tally: RoundedTally,
) -> None:
    """Copy the newest state of rows into table ``index`` of a segment that is being written.

    Args:
        tally: the rows are added.
    """
    chunk_rows = stream.rows_per_chunk[index]
    block_rows = max(
        chunk_rows, rows_per_chunk(spec, limits.block_bytes) // chunk_rows * chunk_rows
    )
    for start in range(0, spec.num_rows, block_rows):
        stop = min(start + block_rows, spec.num_rows)
        before = sum(segment.bytes_read for segment in rows.segments)
        if row_ids is None:
            assert spec.range_begin is not None
            ids = torch.arange(spec.range_begin + start, spec.range_begin + stop)
        else:
            ids = row_ids[start:stop]
        block = _read_block(rows, spec, ids)
        pace.spend(sum(segment.bytes_read for segment in rows.segments) - before)
        assert bool((block.steps >= 0).all()), "a row to merge is in no segment"
        tally.add(block.marks)
        for first in range(0, stop - start, chunk_rows):
            part = slice(first, min(first + chunk_rows, stop - start))
            stream.write(
                index,
                start + first,
                int(block.steps[part].max()),
                block.row_ids[part],
                {name: values[part] for name, values in block.arrays.items()},
                block.exact_in(part.start, part.stop),
                block.largest_error,
            )


def _read_block(rows: NewestRows, spec: TableSpec, row_ids: torch.Tensor) -> StoredBlock:
    """Read rows as a segment is to have them: decoded, unless it has rounded rows itself."""
    if spec.exact_row_bytes:
        return newest_stored(spec.name, rows.segments, spec.arrays, row_ids)
    block = rows.chosen(row_ids)
    return StoredBlock(block.row_ids, block.arrays, block.not_after, block.marks)


def commit_merged(manifest: Manifest, merged: Merged) -> bool:
    """Put the merged segment in the place of its sources; False if they are no longer all live.

    Raises:
        StorageError: the operating system refused; the sources are still live.
        StoreError: the directory was moved or replaced.
    """
    manifest.require_in_place()
    sources = merged.merge.sources
    live = manifest.segments
    at = live.index(sources[0]) if sources[0] in live else -1
    if at < 0 or live[at : at + len(sources)] != sources:
        discard_merged(manifest, merged)
        return False
    merged_live = (*live[:at], merged.record, *live[at + len(sources) :])
    # If this fails, the merged file stays, as the manifest on disk may name it already. Either way
    # the next open finds one state or the other and removes what it does not name.
    manifest.commit(merged_live)
    return True


def discard_merged(manifest: Manifest, merged: Merged) -> None:
    """Remove a merged segment that no manifest names."""
    with suppress(OSError):
        manifest.path_of(merged.record).unlink()
