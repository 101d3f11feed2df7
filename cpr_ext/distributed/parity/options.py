"""The options of parity, as users give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpr_ext.errors import UsageError
from cpr_ext.runtime.validation import as_whole_number

DEFAULT_DELTA_BYTES = 256 << 20


@dataclass(frozen=True)
class Parity:
    """Peers hold XOR parity of each other's table shards in memory.

    Attributes:
        group_size: workers in a group, any one of which can be rebuilt from the others. Each holds
            1 / (group_size - 1) of a shard more; 2 is a mirror.
        hosts: the host of each rank, by rank. A group's workers are placed on different hosts where
            possible. None: every ``LOCAL_WORLD_SIZE`` ranks are on one host.
        every_steps: send changes after every so many steps. Fewer bytes cross the network, as a row
            that several of these steps change is sent once; after a loss up to twice so many steps
            are trained again.
        encode_bytes_per_second: rate at which parity is encoded during training, at the start and
            after a loss. The group is not protected until all is encoded. None: that is done before
            training.
        rebuild_bytes_per_second: rate at which lost rows are rebuilt during training, with
            ``recovery="exact"``. Training resumes at once; rows that a lookup needs are rebuilt
            first. The group is not protected until all rows are there, and its parity. None: all
            lost rows are rebuilt before training.
        delta_bytes: limit of the rows that ``every_steps`` steps may change on a worker, with their
            state. About five times as many bytes are in use at most.

    Raises:
        UsageError: a value out of its range.
    """

    group_size: int = 4
    hosts: Sequence[str | int] | None = None
    delta_bytes: int = DEFAULT_DELTA_BYTES
    every_steps: int = 1
    encode_bytes_per_second: int | None = None
    rebuild_bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        if as_whole_number("group_size", self.group_size, 0) < 2:
            raise UsageError(
                f"group_size is {self.group_size}; it must be 2 (a mirror) or more: a worker alone "
                "has no peer that could hold its parity"
            )
        if self.hosts is not None and (
            isinstance(self.hosts, str | bytes)
            or not isinstance(self.hosts, Sequence)
            or not all(isinstance(host, str | int) for host in self.hosts)
        ):
            raise UsageError(
                f"hosts is {self.hosts!r:.100}; needed: the host of each rank, such as [0, 0, 1, 1]"
            )
        as_whole_number("delta_bytes", self.delta_bytes, 1)
        as_whole_number("every_steps", self.every_steps, 1)
        for name in ("encode_bytes_per_second", "rebuild_bytes_per_second"):
            if (value := getattr(self, name)) is not None:
                as_whole_number(name, value, 1, ", or None")
        if self.rebuild_bytes_per_second is not None and self.every_steps != 1:
            raise UsageError(
                f"rebuild_bytes_per_second goes with every_steps=1, not {self.every_steps}: rows "
                "are rebuilt from the newest step, whose changes the holders must have"
            )
