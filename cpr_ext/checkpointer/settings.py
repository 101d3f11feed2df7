"""The checked options of a ``Checkpointer``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cpr_ext.checkpointer.options import CompactionOptions, StagingOptions
from cpr_ext.errors import UsageError
from cpr_ext.metrics.counters import ScalarWriter
from cpr_ext.saving.background_capture import OverlapChoice
from cpr_ext.saving.priorities import LargestChange, Priority
from cpr_ext.saving.saver import Consistency, WhenBusy
from cpr_ext.schedules.intervals import Schedule
from cpr_ext.state.precision import Precision
from cpr_ext.storage.remote.objects import RemoteOptions
from cpr_ext.storage.retention import Retention
from cpr_ext.validation import (
    as_whole_number,
    require_flag,
    require_kind,
    require_one_of,
    require_positive_or_none,
)

OnNan = Literal["raise", "save"]


@dataclass(frozen=True)
class Settings:
    """All options that say how to save; see ``Checkpointer``.

    Raises:
        UsageError: one is out of range, or two do not go together.
    """

    priority: Priority
    schedule: Schedule
    consistency: Consistency
    num_shards: int
    rebase_after: float | None
    retention: Retention | None
    when_busy: WhenBusy
    on_nan: OnNan
    overlap: OverlapChoice
    staging: StagingOptions
    compaction: CompactionOptions
    count_row_updates: bool
    scalar_writer: ScalarWriter | None
    remote: RemoteOptions | None = None
    save_at_close: bool = True
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        require_one_of("consistency", self.consistency, ("row", "step"))
        require_one_of("when_busy", self.when_busy, ("delay", "wait"))
        require_one_of("on_nan", self.on_nan, ("raise", "save"))
        require_one_of("overlap", self.overlap, ("auto", "always", "never"))
        require_positive_or_none("rebase_after", self.rebase_after)
        object.__setattr__(self, "num_shards", as_whole_number("num_shards", self.num_shards, 1))
        require_kind("priority", self.priority, Priority, "MostFrequentlyUsed(0.125)")
        require_kind("schedule", self.schedule, Schedule, "EverySteps(500)")
        require_kind("staging", self.staging, StagingOptions, "StagingOptions(num_slots=3)")
        require_kind("compaction", self.compaction, CompactionOptions, "CompactionOptions()")
        require_kind("precision", self.precision, Precision, 'Precision(partial="int8")')
        require_kind("retention", self.retention, Retention, "Retention(full_recovery_points=3)")
        require_kind("remote", self.remote, RemoteOptions, "'s3://bucket/job'")
        require_flag("count_row_updates", self.count_row_updates)
        require_flag("save_at_close", self.save_at_close)
        if not callable(getattr(self.scalar_writer, "add_scalar", None)) and (
            self.scalar_writer is not None
        ):
            raise UsageError(
                f"scalar_writer is {self.scalar_writer!r:.100}; needed: an object with "
                "add_scalar(tag, value, step), such as TensorBoard's SummaryWriter"
            )
        if isinstance(self.priority, LargestChange) and self.on_nan == "save":
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')

    @property
    def refuses_nan(self) -> bool:
        """Whether a snapshot is aborted rather than save NaN."""
        return self.on_nan == "raise"
