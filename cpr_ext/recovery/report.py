"""The report of a recovery: the restored rows, and exactly the rows that it could not restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpr_ext.recovery.state_source import StateSource
from cpr_ext.runtime.html_table import html_table


@dataclass(frozen=True)
class DamagedSegment:
    """A segment that is damaged or unreadable, as a whole or in part.

    Attributes:
        path: the file.
        reason: the first error in it.
        num_rows: rows that were not restored from it because of that; a newer segment may hold
            them. -1: unknown.
        is_unreadable: it, or a part of it, could not be read and may be undamaged
            (``on_read_error="fall_back"``); it stays in the store until a newer snapshot with all
            rows is durable.
    """

    path: Path
    reason: str
    num_rows: int
    is_unreadable: bool = False


@dataclass(frozen=True)
class OlderRows:
    """Rows of one table that were restored, but not to their newest saved state.

    Attributes:
        row_ids: (n,) int64, unique.
        steps_older: (n,) int64, steps between the captures of the restored and of the lost state.
            If the lost segment's header is damaged too, its last step is used.
    """

    row_ids: torch.Tensor
    steps_older: torch.Tensor


@dataclass(frozen=True)
class RecoveryReport:
    """The report of a recovery, built once at its end.

    Attributes:
        step: the step from which training resumes (0: the store was empty).
        num_samples: samples trained at that step.
        shards: the shards restored.
        rows_restored: rows of these shards that have a saved state now, of any age (each counted
            once): all but ``rows_missing``.
        rows_stale: rows that are older than the step from which training resumes, each counted
            once; those that had changed since they were last saved, and
            ``older_rows``. None: not known. That is so where an optimizer changes rows without a
            gradient (momentum, weight decay, Adam); and after a process died for large tables,
            and for the stores of several processes.
        rows_missing: rows of which no usable state is left; they keep their values in the model.
        rows_possibly_stale: an upper bound on further rows that are older than their newest saved
            state; damage destroyed their row ids too.
        older_rows, missing_rows: which rows these are, by table; ``missing_rows`` holds row ids
            (n,) int64. Tables without any are left out.
        samples_lost: samples trained since a lost shard's last snapshot, summed over the shards. Of
            rows that damage made older or took, their share of a shard.
        row_updates_lost: updates of these shards' rows that were not saved. None: not counted, see
            ``Checkpointer(count_row_updates=True)``; after a process death, and with rows that
            damage made older or took, it is 0 or None.
        rows_of_other_ids: slots of keyed tables that were emptied, as their restored key has
            another slot, too. There are some after damage, and of lost shards that are restored
            into a live model. They count as restored.
        rows_rounded: so many of ``rows_restored`` have rounded values, see
            :class:`cpr_ext.Precision`. 0: every value is exact. An upper bound after compaction
            and newer snapshots: a compacted segment says how many of its rows were rounded, not
            which.
        largest_rounding_error: no value of them differs by more from the one that was captured.
        segments_read, bytes_read: segments and bytes that the recovery read.
        damaged_segments: the segments that were unusable, as a whole or in part.
        seconds: its duration.
        extra_state: the caller's extra state in the snapshot (after a full restore).
        state_ignored: names of state that the snapshot left out, as ``ignore=`` said.
        differences: with ``strict=False``: where the store's model differs, one sentence each.
        is_proven: all of the restored state is of a full-recovery point that the store records as
            proven; see ``SnapshotHandle.is_proven``.
        source: where the state came from; None: there was none.
    """

    step: int = 0
    num_samples: int = 0
    shards: tuple[int, ...] = ()
    rows_restored: int = 0
    rows_stale: int | None = 0
    rows_missing: int = 0
    rows_possibly_stale: int = 0
    older_rows: dict[str, OlderRows] = field(default_factory=dict)
    missing_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    samples_lost: int = 0
    row_updates_lost: int | None = 0
    rows_of_other_ids: int = 0
    rows_rounded: int = 0
    largest_rounding_error: float = 0.0
    segments_read: int = 0
    bytes_read: int = 0
    damaged_segments: list[DamagedSegment] = field(default_factory=list)
    seconds: float = 0.0
    extra_state: Any = None
    state_ignored: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    is_proven: bool = False
    source: StateSource | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        values = {**vars(self), "source": self.source or "none: the store was empty"}
        del values["extra_state"]
        return html_table(f"Recovered at step {self.step}", values)

    @property
    def rows_damaged(self) -> int:
        """Rows that damage made older than their newest saved state, or took."""
        return self.rows_missing + sum(len(rows.row_ids) for rows in self.older_rows.values())

    @property
    def damage(self) -> str | None:
        """What damage of the store took, in a sentence; None: nothing."""
        if not (self.rows_damaged or self.rows_possibly_stale):
            return None
        tables = ", ".join(sorted({*self.missing_rows, *self.older_rows})) or "unknown tables"
        text = (
            f"damage of the store took the state of {self.rows_missing} rows, and "
            f"{self.rows_damaged - self.rows_missing} are older than saved ({tables})"
        )
        if self.rows_possibly_stale:
            text += f"; up to {self.rows_possibly_stale} further rows may be older"
        return text

    @property
    def unreadable_paths(self) -> set[Path]:
        """Segments that could not be read, as a whole or in part."""
        return {damaged.path for damaged in self.damaged_segments if damaged.is_unreadable}
