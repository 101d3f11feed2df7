"""What a recovery finds while it runs; at its end the report is built from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.report import DamagedSegment, OlderRows, RecoveryReport
from cpr_ext.recovery.state_source import StateSource
from cpr_ext.storage.retries import UnreadableError
from cpr_ext.storage.rounded_chunks import RoundedTally
from cpr_ext.storage.segment_format import Segment, most_rounded


@dataclass
class Findings:
    """The numbers of a recovery so far; see :class:`RecoveryReport` for each."""

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
    source: StateSource | None = None

    @property
    def are_newest(self) -> bool:
        """Whether each row was restored from its newest save."""
        return not self.damaged_segments and self.rows_missing == self.rows_possibly_stale == 0

    def report(self) -> RecoveryReport:
        """Build the report; what is found later does not change it."""
        return RecoveryReport(
            **{name: _own(value) for name, value in vars(self).items() if name != "extra_state"},
            extra_state=self.extra_state,
        )

    def add_damaged(self, path: Path, error: DamageError, num_rows: int = -1) -> None:
        """Record that a segment, or ``num_rows`` rows of it, is unusable."""
        is_unreadable = isinstance(error, UnreadableError)
        self.damaged_segments.append(DamagedSegment(path, str(error), num_rows, is_unreadable))

    def add_rounded(self, tally: RoundedTally, segments: Sequence[Segment]) -> None:
        """Count the rounded ones of rows that were restored from segments."""
        rounded = most_rounded(tally, segments)
        self.rows_rounded += rounded.num_rows
        self.largest_rounding_error = max(self.largest_rounding_error, rounded.largest_error)

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


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value
