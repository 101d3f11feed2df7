"""Options of a ``Checkpointer``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.runtime.validation import (
    as_shard_count,
    as_whole_number,
    require_flag,
    require_instance,
    require_kind,
    require_one_of,
    require_positive_or_none,
)
from cpr_ext.saving.priorities import LargestChange, Priority
from cpr_ext.saving.schedules import Schedule
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
class StoreOptions:
    """What a store keeps, how exactly, and where a copy of it is.

    Attributes:
        rebase_after: take a base snapshot instead of a partial one after partial snapshots have
            written this many times the bytes of the last base; this bounds disk use and recovery
            time; None: never.
        retention: how many full-recovery points to keep, and how many bytes in all: a
            ``cpr_ext.Retention``. None: the newest snapshot only.
        precision: how many bits snapshots keep of each row: :class:`cpr_ext.Precision`.
        remote: object storage to which committed states are copied in the background:
            ``cpr_ext.RemoteOptions("s3://bucket/job")``. If the directory is empty, the state there
            is read into it first. See ``docs/remote.md``.
        on_nan: ``"raise"`` aborts a snapshot rather than save NaN; ``"save"`` saves it.

    Raises:
        UsageError: a value is out of range, or of another kind.
    """

    rebase_after: float | None = 4.0
    retention: Retention | None = None
    precision: Precision = field(default_factory=Precision)
    remote: Remote | None = None
    on_nan: OnNan = "raise"

    def __post_init__(self) -> None:
        require_one_of("on_nan", self.on_nan, ("raise", "save"))
        require_positive_or_none("rebase_after", self.rebase_after)
        require_instance("precision", self.precision, Precision, 'Precision(partial="int8")')
        require_kind("retention", self.retention, Retention, "Retention(full_recovery_points=3)")
        require_kind("remote", self.remote, Remote, "RemoteOptions('s3://bucket/job')")

    @property
    def refuses_nan(self) -> bool:
        """Whether a snapshot is aborted rather than save NaN."""
        return self.on_nan == "raise"


@dataclass(frozen=True)
class CheckpointerOptions:
    """All options that say how to save; ``Checkpointer`` describes each.

    Raises:
        UsageError: one is out of range, or two do not go together.
    """

    priority: Priority
    schedule: Schedule
    num_shards: int
    store: StoreOptions
    staging: StagingOptions

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_shards", as_shard_count(self.num_shards))
        require_instance("priority", self.priority, Priority, "MostFrequentlyUsed(0.125)")
        require_schedule(self.schedule)
        require_instance("store", self.store, StoreOptions, "StoreOptions(rebase_after=2.0)")
        require_instance("staging", self.staging, StagingOptions, "StagingOptions(num_slots=3)")
        if isinstance(self.priority, LargestChange) and not self.store.refuses_nan:
            raise UsageError('LargestChange cannot rank NaN rows; use on_nan="raise" with it')


def require_schedule(schedule: Schedule) -> None:
    """Raise UsageError unless it is a schedule whose ``when_busy`` there is."""
    require_instance("schedule", schedule, Schedule, "EverySteps(500)")
    schedule.require_sound()
