"""Compact a store that no process trains on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cpr_ext.errors import UsageError
from cpr_ext.state.position import MAX_WRITABLE
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.merge import MergeLimits, commit_merged, write_merged
from cpr_ext.storage.merge_plan import plan_merges, recovery_points
from cpr_ext.storage.segment_writer import Pace
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance.locking import locked


@dataclass
class CompactReport:
    """What a compaction did.

    Attributes:
        store: the directory.
        shards_compacted: shards of which segments were merged.
        segments_before, segments_after: live segments of all shards.
        bytes_before, bytes_after: their size.
        bytes_read, bytes_written: by the compaction.
    """

    store: str
    shards_compacted: int = 0
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


def compact(store: str | os.PathLike[str], *, limits: MergeLimits | None = None) -> CompactReport:
    """Merge each shard's base and partial segments, up to the newest snapshot.

    Every recovery point stays reachable: the newest snapshot and each full-recovery point.

    Args:
        store: the directory; no process may be training on it.
        limits: memory and bandwidth.

    Raises:
        StoreError: not a store, or a process is training on it (named).
        DamageError: a segment to merge is damaged (named); it and its shard are left as they are.
        StorageError: the operating system refused.
    """
    limits = limits or MergeLimits()
    if limits.bytes_per_second is not None and not limits.bytes_per_second > 0:
        raise UsageError(f"bytes_per_second is {limits.bytes_per_second}; it must be positive")
    reader = StoreReader(store)
    with locked([manifest.directory for manifest in [reader.dense, *reader.shards]]):
        reader.refresh()  # what was committed before the locks were ours
        for manifest in [reader.dense, *reader.shards]:
            manifest.require_room(MAX_WRITABLE)
        return _compact_locked(reader, limits)


def _compact_locked(reader: StoreReader, limits: MergeLimits) -> CompactReport:
    report = CompactReport(str(reader.directory))
    points = recovery_points(reader.dense.segments)
    pace = Pace(limits.bytes_per_second)
    report.segments_before, report.bytes_before = _size(reader.shards)
    for shard, manifest in enumerate(reader.shards):
        manifest.remove_unlisted()
        ranges = {name: reader.row_range(name, shard) for name in reader.tables}
        merges = plan_merges(manifest.segments, points)
        for merge in merges:
            merged = write_merged(manifest, shard, ranges, merge, limits, pace)
            commit_merged(manifest, merged)
            report.bytes_read += merged.bytes_read
            report.bytes_written += merged.record.file_bytes
        report.shards_compacted += bool(merges)
    report.segments_after, report.bytes_after = _size(reader.shards)
    return report


def _size(shards: list[Manifest]) -> tuple[int, int]:
    records = [record for manifest in shards for record in manifest.segments]
    return len(records), sum(record.file_bytes for record in records)
