"""The history of a training run, saved with each snapshot so that it survives a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Enough for a picture, little for a snapshot.
_MAX_LOSS_POINTS = 2000

FailureResponse = Literal["partial", "full", "none"]


@dataclass
class FailureRecord:
    """One failure and what recovering from it took.

    Attributes:
        step: training step after which it struck, counted from 1.
        num_samples: samples trained by then.
        shards: the shards lost.
        recovery: how they were recovered.
        rows_restored: rows restored to a saved state.
        rows_stale: rows whose last update is lost; None: not known.
        samples_lost: samples trained since a lost shard's last snapshot, summed over the shards.
        samples_retrained: samples trained again after going back.
        seconds: time until training could resume.
    """

    step: int
    num_samples: int
    shards: list[int]
    recovery: FailureResponse
    rows_restored: int = 0
    rows_stale: int | None = 0
    samples_lost: int = 0
    samples_retrained: int = 0
    seconds: float = 0.0


@dataclass
class RunLog:
    """What happened so far.

    Attributes:
        losses: (samples trained, mean training loss of the steps since the last point).
        loss_sum, loss_steps: what the next point is the mean of.
        snapshots: (samples trained, "base" or "partial") of each snapshot begun.
        epoch, batch: the position in the data: the next batch to train.
        damage: what damage of the store took at resumptions, a sentence each.
        samples_lost_to_damage: samples whose effect that took, summed over the shards.
        config: what must not change between a run and its continuation.
    """

    config: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    batch: int = 0
    losses: list[list[float]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_steps: int = 0
    snapshots: list[list[Any]] = field(default_factory=list)
    failures: list[FailureRecord] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    samples_lost_to_damage: int = 0

    def add_loss(self, num_samples: int, loss: float) -> None:
        """Note a point of the loss curve; a long run keeps every second of its points."""
        self.losses.append([num_samples, loss])
        if len(self.losses) > _MAX_LOSS_POINTS:
            del self.losses[::2]

    def samples_since_loss(self, num_samples: int, shard: int) -> int:
        """Return samples trained since ``shard`` was last lost, or since the start."""
        lost_at = [failure.num_samples for failure in self.failures if shard in failure.shards]
        return num_samples - max(lost_at, default=0)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> RunLog:
        """Invert ``asdict``."""
        failures = [FailureRecord(**failure) for failure in plain["failures"]]
        return cls(**{**plain, "failures": failures})
