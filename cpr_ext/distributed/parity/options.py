"""The options of parity, as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.errors import UsageError

DEFAULT_DELTA_BYTES = 256 << 20


@dataclass(frozen=True)
class Parity:
    """Peers hold XOR parity of each other's table shards in memory.

    Attributes:
        group_size: workers in a group, any one of which can be rebuilt from the others. Each holds
            1 / (group_size - 1) of a shard more; 2 is a mirror.
        hosts: the host of each rank, by rank. A group's workers are placed on different hosts where
            possible. None: every ``LOCAL_WORLD_SIZE`` ranks are on one host.
        delta_bytes: limit of the rows that one step may change on a worker, with their state.
            About five times as many bytes are in use at most.

    Raises:
        UsageError: a value out of its range.
    """

    group_size: int = 4
    hosts: Sequence[str | int] | None = None
    delta_bytes: int = DEFAULT_DELTA_BYTES

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(
                f"group_size is {self.group_size}; it must be 2 (a mirror) or more: a worker alone "
                "has no peer that could hold its parity"
            )
        if self.delta_bytes < 1:
            raise UsageError(f"delta_bytes is {self.delta_bytes}; it must be above 0")
