"""Options of a ``Checkpointer``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.runtime.termination import OnSigterm
from cpr_ext.runtime.validation import (
    as_shard_count,
    as_whole_number,
    require_flag,
    require_kind,
    require_one_of,
    require_positive_or_none,
)
from cpr_ext.saving.background_capture import OverlapChoice
from cpr_ext.saving.priorities import LargestChange, MostFrequentlyUsed, Priority
from cpr_ext.saving.saver import WhenBusy
from cpr_ext.schedules.intervals import EverySeconds, Schedule
from cpr_ext.state.precision import Precision
from cpr_ext.storage.origin import Remote
from cpr_ext.storage.retention import Retention


@dataclass(frozen=True)
class StagingOptions:
    """How rows travel from the tables to the disk, and the memory that this takes.

    Attributes:
        slot_bytes: size of a staging slot. None: 8 MB, or more if a table's rows need it.
        num_slots: number of staging slots, at least 2. They are the memory of a snapshot; every GPU
            that has tables needs the same amount.
        num_threads: threads for counting, selecting and copying, the caller's included. None: one
            for each core, at most 4.
        direct_io: bypass the page cache where the file system allows it.
        gather_bytes: limit of the GPUs' memory for the rows of a partial snapshot, which they copy
            there at one step. A snapshot that needs more is captured over several steps, or, of one
            step, while training waits. 0: they copy none. Used if all tables are on GPUs.

    Raises:
        UsageError: a number is out of range.
    """

    slot_bytes: int | None = None
    num_slots: int = 3
    num_threads: int | None = None
    direct_io: bool = True
    gather_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 2), ("gather_bytes", 0)):
            object.__setattr__(self, name, as_whole_number(name, getattr(self, name), least))
        require_flag("direct_io", self.direct_io)
        for name in ("slot_bytes", "num_threads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_whole_number(name, value, 1, ", or None"))


OnNan = Literal["raise", "save"]


@dataclass(frozen=True)
class CheckpointerOptions:
    """All options that say how to save; ``Checkpointer`` describes each.

    Raises:
        UsageError: one is out of range, or two do not go together.
    """

    priority: Priority = field(default_factory=MostFrequentlyUsed)
    schedule: Schedule = field(default_factory=lambda: EverySeconds(60))
    num_shards: int = 1
    rebase_after: float | None = 4.0
    retention: Retention | None = None
    when_busy: WhenBusy = "delay"
    save_at_close: bool = True
    on_nan: OnNan = "raise"
    overlap: OverlapChoice = "auto"
    staging: StagingOptions = field(default_factory=StagingOptions)
    count_row_updates: bool = False
    remote: Remote | None = None
    precision: Precision = field(default_factory=Precision)
    on_sigterm: OnSigterm | None = None

    def __post_init__(self) -> None:
        require_one_of("when_busy", self.when_busy, ("delay", "wait"))
        require_one_of("on_nan", self.on_nan, ("raise", "save"))
        require_one_of("overlap", self.overlap, ("auto", "always", "never"))
        require_positive_or_none("rebase_after", self.rebase_after)
        object.__setattr__(self, "num_shards", as_shard_count(self.num_shards))
        require_kind("priority", self.priority, Priority, "MostFrequentlyUsed(0.125)")
        require_kind("schedule", self.schedule, Schedule, "EverySteps(500)")
        require_kind("staging", self.staging, StagingOptions, "StagingOptions(num_slots=3)")
        require_kind("precision", self.precision, Precision, 'Precision(partial="int8")')
        require_kind("retention", self.retention, Retention, "Retention(full_recovery_points=3)")
        require_kind("remote", self.remote, Remote, "RemoteOptions('s3://bucket/job')")
        require_flag("count_row_updates", self.count_row_updates)
        require_flag("save_at_close", self.save_at_close)
        if isinstance(self.priority, LargestChange) and self.on_nan == "save":
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')

    @property
    def chooses_all(self) -> bool:
        """Whether a partial snapshot saves every dirty row."""
        return self.priority.fraction >= 1

    @property
    def refuses_nan(self) -> bool:
        """Whether a snapshot is aborted rather than save NaN."""
        return self.on_nan == "raise"
