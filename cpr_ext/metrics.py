"""What checkpointing did and cost so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metrics:
    """What checkpointing did and cost so far.

    Attributes:
        base_snapshots, partial_snapshots, failed_snapshots: how many.
        bytes_written: of committed segments.
        stall_seconds: time that ``step()`` held training, in all.
        max_stall_seconds: the longest such time.
        samples_lost: samples whose effect failures took from lost shards, summed over the shards.
        compactions, failed_compactions: merged segments that became live; merges that failed.
    """

    base_snapshots: int = 0
    partial_snapshots: int = 0
    failed_snapshots: int = 0
    bytes_written: int = 0
    stall_seconds: float = 0.0
    max_stall_seconds: float = 0.0
    samples_lost: int = 0
    compactions: int = 0
    failed_compactions: int = 0
    failures: list[str] = field(default_factory=list)
