"""What parity in peers' memory costs: memory, network, training time, and time to rebuild.

Groups of ``g = k + 1`` workers hold the XOR of each other's rows, as ECRM does (arXiv 2104.01981).
The formulas are derived, for bits and rotating parity. ``g = 2`` is a mirror.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.checks import require_not_negative, require_positive

ROW_ID_BYTES = 8  # that a delta carries with each row


@dataclass(frozen=True)
class ParityCosts:
    """What parity costs a job.

    Attributes:
        group_size: workers in a group, ``g``; any one of them can be rebuilt from the others.
        steady_share: training time that sending deltas adds, as a share of it.
        rebuild_hours: to decode the rows of a lost worker and to encode again the parity that it
            held, once its replacement has started.
        rebuild_stall: how much of training speed is lost meanwhile; 1: training stands still.
    """

    group_size: int
    steady_share: float
    rebuild_hours: float
    rebuild_stall: float = 1.0

    def __post_init__(self) -> None:
        require_group(self.group_size)
        require_not_negative(
            {"steady_share": self.steady_share, "rebuild_hours": self.rebuild_hours}
        )
        if not 0 <= self.rebuild_stall <= 1:
            raise UsageError(f"rebuild_stall is {self.rebuild_stall}; it is a share: 0 to 1")

    @property
    def name(self) -> str:
        """``mirror``, or data and parity such as ``3 + 1``."""
        return "mirror" if self.group_size == 2 else f"{self.group_size - 1} + 1"

    def require_fit(self, num_shards: int) -> None:
        """Raise UsageError unless groups of this size fit ``num_shards`` workers."""
        if num_shards % self.group_size:
            sizes = [size for size in range(2, num_shards + 1) if num_shards % size == 0]
            raise UsageError(
                f"a parity group of {self.group_size} does not fit {num_shards} shards, which must "
                f"be a multiple of it; possible here: {sizes or 'none'}"
            )


def require_group(group_size: int) -> None:
    """Raise UsageError unless a group has a peer."""
    if group_size < 2:
        raise UsageError(f"group_size is {group_size}; it must be 2 (a mirror) or more")


def extra_memory_share(group_size: int) -> float:
    """Return the memory for parity, as a share of that for rows and their state: ``1/k``."""
    require_group(group_size)
    return 1 / (group_size - 1)


def step_bytes(rows: float, row_bytes: float) -> float:
    """Return what all workers send in a step: ``U*(r + 8)``, for any group size.

    Args:
        rows: different rows that a step changes, on all workers together, ``U``.
        row_bytes: of a row with its per-row optimizer state, ``r``.

    Raises:
        UsageError: a figure is not above 0.
    """
    require_positive({"rows": rows, "row_bytes": row_bytes})
    return rows * (row_bytes + ROW_ID_BYTES)


def link_bytes(rows: float, row_bytes: float, num_shards: int) -> float:
    """Return what one worker sends in a step, and receives: its share of :func:`step_bytes`.

    Raises:
        UsageError: a figure is not above 0.
    """
    require_positive({"num_shards": num_shards})
    return step_bytes(rows, row_bytes) / num_shards


def wire_share(link_bytes: float, step_seconds: float, link_bytes_per_second: float) -> float:
    """Return the share of a step that a worker's link is busy with parity.

    It bounds the steady cost from below only where the network is training's bottleneck; deltas
    travel during forward and backward.

    Raises:
        UsageError: a figure is not above 0.
    """
    require_positive({"step_seconds": step_seconds, "link_bytes_per_second": link_bytes_per_second})
    return link_bytes / link_bytes_per_second / step_seconds


def rebuild_hours(shard_bytes: float, group_size: int, link_bytes_per_second: float) -> float:
    """Return the time to rebuild a shard at the speed of one link: ``(1 + 1/k)*shard/link``.

    ``k`` reduces of ``1/k`` of a shard each decode it: no link carries more than about a shard.
    One more of ``1/k`` encodes the parity that the lost worker held.

    Args:
        shard_bytes: rows of one worker, with their state.

    Raises:
        UsageError: a figure is out of range.
    """
    require_positive({"shard_bytes": shard_bytes, "link_bytes_per_second": link_bytes_per_second})
    moved = shard_bytes * (1 + extra_memory_share(group_size))
    return moved / link_bytes_per_second / 3600
