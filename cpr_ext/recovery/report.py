"""The report of a recovery: the restored rows, and exactly the rows that it could not restore."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from cpr_ext.errors import DamageError
from cpr_ext.runtime.log_text import html_table

SourceKind = Literal["own store", "copy", "other stores"]


@dataclass(frozen=True)
class StateSource:
    """Where a recovered state came from.

    Attributes:
        kind: ``own store``: the directory of this job. ``copy``: object storage, as the directory
            was empty. ``other stores``: those of ``from_store``.
        place: the directory, the address, or the directories.
        age_seconds: time since the state was saved, by the clocks of both machines; None: not
            known. What was trained after it and before the failure is lost. How much that is, a
            copy does not show.
    """

    kind: SourceKind
    place: str
    age_seconds: float | None = None

    def __str__(self) -> str:
        age = "" if self.age_seconds is None else f", saved {self.age_seconds:.0f} s ago"
        return f"{self.kind} ({self.place}){age}"


def age_of(path: Path) -> float | None:
    """Return how long ago a file was written; None: it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


@dataclass(frozen=True)
class DamagedSegment:
    """A segment that is damaged, as a whole or in part.

    Attributes:
        path: the file.
        reason: the first error in it.
        num_rows: rows that were not restored from it because of that; a newer segment may hold
            them. -1: unknown.
    """

    path: Path
    reason: str
    num_rows: int


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


@dataclass
class RecoveryReport:
    """The report of a recovery, which fills it.

    Attributes:
        step: the step from which training resumes (0: the store was empty).
        num_samples: samples trained at that step.
        shards: the shards restored.
        rows_restored: rows of these shards that have a saved state now, of any age (each counted
            once): all but ``rows_missing``.
        rows_stale: rows that are older than the step from which training resumes, each counted
            once; those that had changed since they were last saved, and
            ``older_rows``. What is written past PyTorch is in it once a check has found it. None:
            not known. That is so where an optimizer changes rows without a gradient (momentum,
            weight decay, Adam); and after a process died for large tables, and for the stores of
            several processes.
        rows_missing: rows of which no usable state is left; they keep their values in the model.
        rows_possibly_stale: an upper bound on further rows that are older than their newest saved
            state; damage destroyed their row ids too.
        older_rows, missing_rows: which rows these are, by table; ``missing_rows`` holds row ids
            (n,) int64. Tables without any are left out.
        samples_lost: samples trained since a lost shard's last snapshot, summed over the shards. Of
            rows that damage made older or took, their share of a shard.
        row_updates_lost: updates of these shards' rows that were not saved. None: only
            ``MostFrequentlyUsed`` counts them. After a process death, and with rows that
            damage made older or took, it is 0 or None.
        rows_of_other_ids: slots of keyed tables that were emptied, as their restored key has
            another slot, too. There are some after damage, and of lost shards that are restored
            into a live model. They count as restored.
        rows_rounded: at most so many of ``rows_restored`` have rounded values, see
            :class:`cpr_ext.Precision`; one that several snapshots have rounded counts for each.
            0: every value is exact.
        segments_read, bytes_read: segments and bytes that the recovery read.
        damaged_segments: the segments that were unusable, as a whole or in part.
        seconds: its duration.
        state: what the callables of ``Checkpointer(state=...)`` returned when it was saved, by name
            (after a full restore).
        differences: with ``strict=False``: where the store's model differs, one sentence each.
        is_complete: all of the restored state is of one step, of a full-recovery point.
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
    segments_read: int = 0
    bytes_read: int = 0
    damaged_segments: list[DamagedSegment] = field(default_factory=list)
    seconds: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    is_complete: bool = False
    source: StateSource | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        values = {**vars(self), "source": self.source or "none: the store was empty"}
        del values["state"]
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

    def add_damaged(self, path: Path, error: DamageError, num_rows: int = -1) -> None:
        """Record that a segment, or ``num_rows`` rows of it, is unusable."""
        self.damaged_segments.append(DamagedSegment(path, str(error), num_rows))

    def add_stale(self, count: int) -> None:
        """Count further stale rows, unless the number is unknown."""
        if self.rows_stale is not None:
            self.rows_stale += count

    def add_lost_updates(self, count: int | None) -> None:
        """Count further lost updates of rows; None: unknown, and then the sum is, too."""
        known = self.row_updates_lost
        self.row_updates_lost = None if known is None or count is None else known + count

    def add_older(self, table: str, row_ids: torch.Tensor, steps_older: torch.Tensor) -> None:
        """Record rows that were restored to an older state; each is added once."""
        self.add_stale(len(row_ids))
        if (known := self.older_rows.get(table)) is not None:
            row_ids = torch.cat([known.row_ids, row_ids])
            steps_older = torch.cat([known.steps_older, steps_older])
        if len(row_ids):
            self.older_rows[table] = OlderRows(row_ids, steps_older)

    def add_missing(self, table: str, row_ids: torch.Tensor) -> None:
        """Record rows of which no state is left; each is added once."""
        self.rows_missing += len(row_ids)
        if len(row_ids):
            known = self.missing_rows.get(table, row_ids[:0])
            self.missing_rows[table] = torch.cat([known, row_ids])

    def samples_of_damage(self, num_rows: int, num_shards: int) -> int:
        """Return samples whose effect damage took, as the share that its rows have of a shard.

        A missing row lost all samples, an older one those of the steps between its two states.

        Args:
            num_rows: of all tables.
        """
        per_step = self.num_samples / max(1, self.step)
        older = sum(int(rows.steps_older.sum()) for rows in self.older_rows.values()) * per_step
        lost = (self.rows_missing * self.num_samples + older) * num_shards / max(1, num_rows)
        return math.ceil(lost)

    def not_newest(self, table: str) -> torch.Tensor:
        """Return (n,) int64, the rows of a table that are older or missing."""
        found = [self.missing_rows[table]] if table in self.missing_rows else []
        found += [self.older_rows[table].row_ids] if table in self.older_rows else []
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
