"""Options of a ``Checkpointer`` that belong together."""

from __future__ import annotations

from dataclasses import dataclass

from cpr_ext.runtime.validation import as_whole_number, require_flag, require_positive_or_none


@dataclass(frozen=True)
class StagingOptions:
    """How rows travel from the tables to the disk, and the memory that this takes.

    Attributes:
        slot_bytes: size of a staging slot. None: 8 MB, or more if a table's rows need it.
        num_slots: number of staging slots, at least 2. They are the memory of a snapshot; every GPU
            that has tables needs the same amount.
        copy_on_write_bytes: limit of the memory for rows that are copied before they change; when
            it is full, training waits for the disk.
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
    copy_on_write_bytes: int = 32 << 20
    num_threads: int | None = None
    direct_io: bool = True
    gather_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name, least in (("num_slots", 2), ("copy_on_write_bytes", 0), ("gather_bytes", 0)):
            object.__setattr__(self, name, as_whole_number(name, getattr(self, name), least))
        require_flag("direct_io", self.direct_io)
        for name in ("slot_bytes", "num_threads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_whole_number(name, value, 1, ", or None"))


@dataclass(frozen=True)
class CompactionOptions:
    """When a background thread merges the partial segments of a shard, and how fast.

    Attributes:
        after: merge them once they hold this many times the bytes of the shard's base; partial
            snapshots then need no new base. None: never.
        bytes_per_second: the most that compaction reads and writes; None: no limit.

    Raises:
        UsageError: a number is not positive.
    """

    after: float | None = 1.0
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        require_positive_or_none("CompactionOptions.after", self.after)
        require_positive_or_none("CompactionOptions.bytes_per_second", self.bytes_per_second)
