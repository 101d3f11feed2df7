"""The parity groups of a job while failures strike: which losses the store must serve."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlayedGroups:
    """The parity groups of a job while failures strike.

    Attributes:
        window_hours: from a loss until its group is whole again.
    """

    group_size: int
    window_hours: float
    _until: dict[int, float] = field(default_factory=dict)
    _lost: dict[int, set[int]] = field(default_factory=dict)
    _no_parity: set[int] = field(default_factory=set)

    def lose(self, hour: float, shards: list[int]) -> set[int]:
        """Take a failure; return the shards that the store must serve, empty: parity suffices."""
        for group in [group for group, until in self._until.items() if until <= hour]:
            del self._until[group], self._lost[group]
            self._no_parity.discard(group)
        for shard in shards:
            group = shard // self.group_size
            self._lost.setdefault(group, set()).add(shard)
            self._until[group] = hour + self.window_hours
        struck = {shard // self.group_size for shard in shards}
        unable = [g for g in struck if len(self._lost[g]) > 1 or g in self._no_parity]
        served = set().union(*(self._lost[group] for group in unable))
        for group, lost in self._lost.items() if unable else ():
            lost.clear()  # its rows are back, its parity is encoded again
            self._until[group] = hour + self.window_hours
            self._no_parity.add(group)
        return served
