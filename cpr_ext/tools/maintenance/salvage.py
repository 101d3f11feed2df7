"""What to keep of a shard's segments: whole files, or a new file of their sound rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cpr_ext.storage.file_names import Kind, segment_name
from cpr_ext.storage.lineage import NO_ID
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.merge import MergeLimits, copy_table
from cpr_ext.storage.newest_rows import NewestRows
from cpr_ext.storage.rounded_chunks import RoundedRows, RoundedTally
from cpr_ext.storage.segment_format import Committed, TableSpec, most_rounded
from cpr_ext.storage.segment_reader import RowRanges
from cpr_ext.storage.segment_writer import Pace, SegmentStream
from cpr_ext.tools.maintenance.survey import Held


@dataclass(frozen=True)
class Rewrite:
    """A segment to write from the sound rows of others; of a row the newest state.

    Attributes:
        sources: oldest first.
        kind: ``base`` if together they hold all rows of the shard.
        as_snapshot: number of the segment; None: that of its newest source.
    """

    sources: tuple[Held, ...]
    kind: Kind
    as_snapshot: int | None = None

    @property
    def snapshot(self) -> int:
        """Number of the segment."""
        newest = self.sources[-1].record.snapshot
        return newest if self.as_snapshot is None else self.as_snapshot

    @property
    def file(self) -> str:
        """Its name."""
        return segment_name(self.snapshot, self.kind)


@dataclass
class ShardPlan:
    """What becomes of a shard's segments.

    Attributes:
        kept: what the manifest is to name, oldest first.
        incomplete: snapshots of which some rows fell back to an older state: [first, end).
        rows_lost: at least so many rows have no sound state left, by table; then nothing can be
            repaired.
    """

    kept: list[Held | Rewrite] = field(default_factory=list)
    incomplete: list[tuple[int, float]] = field(default_factory=list)
    rows_lost: dict[str, int] = field(default_factory=dict)

    @property
    def first_snapshot(self) -> int:
        """Recovery points before this one have lost their base."""
        return _snapshot(self.kept[0]) if self.kept else 0


def plan_shard(
    held: list[Held], ranges: RowRanges, newest_number: float = float("inf")
) -> ShardPlan:
    """Keep sound segments; rewrite the sound rows of the rest, under a base of all rows.

    Args:
        newest_number: segments of later snapshots, which are of another commit than the dense part,
            are put together with all others under this number.
    """
    plan = ShardPlan(rows_lost=_never_held(held, ranges))
    if plan.rows_lost:
        return plan  # and nothing is reserved for rows that STORE.json alone tells of
    covered = {n: torch.zeros(e - b, dtype=torch.bool) for n, (b, e) in ranges.items() if b < e}
    sources: list[Held] = []  # since the newest base, that one included
    has_base = False
    for segment in held:
        record = segment.record
        if segment.is_sound and record.kind == "base":
            _end_incomplete(plan, record.snapshot)
            plan.kept = [*plan.kept, segment] if has_base else [segment]
            has_base, sources = True, [segment]
            for rows in covered.values():
                rows[:] = True
            continue
        _cover(covered, ranges, segment)
        sources.append(segment)
        if not segment.is_sound:
            plan.incomplete.append((record.snapshot, float("inf")))
        if record.kind == "base" or not has_base:
            if all(bool(rows.all()) for rows in covered.values()):
                plan.kept.append(Rewrite(tuple(sources), "base"))
                has_base = True
            continue
        plan.kept += _without_damage(segment)
    if has_base and held[-1].record.snapshot > newest_number:
        base = Rewrite(_since_base(held), "base", int(newest_number))
        plan.kept = [base]
    plan.rows_lost = {} if has_base else {n: int((~r).sum()) for n, r in covered.items()}
    plan.rows_lost = {name: count for name, count in plan.rows_lost.items() if count}
    return plan


def _since_base(held: list[Held]) -> tuple[Held, ...]:
    bases = [n for n, each in enumerate(held) if each.is_sound and each.record.kind == "base"]
    return tuple(held[bases[-1] if bases else 0 :])


def _never_held(held: list[Held], ranges: RowRanges) -> dict[str, int]:
    """Count the rows of each table that no segment could hold."""
    missing = {}
    for table, (begin, end) in ranges.items():
        specs = (segment.rows.table(table) for segment in held if segment.rows is not None)
        num_rows = sum(spec.num_rows for spec in specs if spec is not None)
        if end - begin > num_rows:
            missing[table] = end - begin - num_rows
    return missing


def _without_damage(segment: Held) -> list[Held | Rewrite]:
    if segment.is_sound:
        return [segment]
    if segment.rows is None:
        return []
    # Its file stays until the manifest does not name it: another kind, which readers treat alike.
    other: Kind = "merged" if segment.record.kind == "partial" else "partial"
    return [Rewrite((segment,), other)]


def _end_incomplete(plan: ShardPlan, snapshot: int) -> None:
    plan.incomplete = [(first, min(end, snapshot)) for first, end in plan.incomplete]


def _cover(covered: Mapping[str, torch.Tensor], ranges: RowRanges, segment: Held) -> None:
    for table, rows in covered.items():
        for row_ids in segment.row_ids(table):
            rows[row_ids - ranges[table][0]] = True


def _snapshot(item: Held | Rewrite) -> int:
    return item.snapshot if isinstance(item, Rewrite) else item.record.snapshot


def _row_ids(
    ranges: RowRanges, rewrite: Rewrite, usable: Sequence[Held]
) -> dict[str, torch.Tensor | None]:
    """Row ids of each table that has rows; None: all."""
    ids: dict[str, torch.Tensor | None] = {}
    for name in ranges:
        if not any(held.rows is not None and held.rows.table(name) for held in usable):
            continue
        found = [row_ids for held in usable for row_ids in held.row_ids(name)]
        if rewrite.kind == "base":
            ids[name] = None
        elif found:
            ids[name] = torch.unique(torch.cat(found))
    return ids


def write_salvaged(
    directory: Path, shard: int, ranges: RowRanges, rewrite: Rewrite, chain_before: str
) -> SegmentRecord:
    """Write a segment into ``directory``, and sync it.

    Args:
        chain_before: chain of the shard before it.

    Raises:
        StorageError: the operating system refused.
    """
    usable = [held for held in rewrite.sources if held.rows is not None]
    opened = [held.rows for held in usable if held.rows is not None]
    ids = _row_ids(ranges, rewrite, usable)
    tables = {name: NewestRows(name, opened, on_damage=lambda *_: None) for name in ids}
    specs = tuple(
        TableSpec(
            name,
            ranges[name][1] - ranges[name][0] if (held := ids[name]) is None else len(held),
            ranges[name][0] if held is None else None,
            rows.arrays,
        )
        for name, rows in tables.items()
    )
    limits, records, tally = MergeLimits(), [held.record for held in usable], RoundedTally()
    with SegmentStream(
        directory,
        snapshot=rewrite.snapshot,
        kind=rewrite.kind,
        tables=specs,
        metadata={
            "shard": shard,
            "salvaged_from": [record.file for record in records],
            **RoundedRows.together([rows.segment.rounded for rows in opened]).to_note(),
        },
        chunk_bytes=limits.chunk_bytes,
        pace=Pace(),
    ) as stream:
        for index, spec in enumerate(specs):
            rows = tables[spec.name]
            copy_table(rows, index, spec, ids[spec.name], stream, limits, Pace(), tally)
        return stream.finish(
            Committed(
                first_step=min(record.first_step for record in records),
                last_step=max(record.last_step for record in records),
                num_samples=rewrite.sources[-1].record.num_samples,
                chain_before=chain_before,
                merged_chain=NO_ID,
            ),
            rounded=most_rounded(tally, [rows.segment for rows in opened]),
        )
