"""The decision how workers recover that met again: a pure function of their statuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Literal

from cpr_ext.distributed.collective.account import LossAccount

Choice = Literal["partial", "full"]


@dataclass(frozen=True)
class Status:
    """What a worker reports about itself when it joins.

    Attributes:
        is_live: it holds the state of its shards in memory.
        step: training steps it has completed; those of its newest snapshot if it is not live.
        full_points: steps of the full-recovery points in its store.
        choice: how to recover, in its opinion.
        account: the losses that it has reported.
    """

    is_live: bool
    step: int
    full_points: tuple[int, ...]
    choice: Choice
    account: LossAccount

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "account": self.account.to_plain()}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Status:
        """Invert :meth:`to_plain`."""
        points, account = tuple(plain["full_points"]), LossAccount.from_plain(plain["account"])
        return cls(plain["is_live"], plain["step"], points, plain["choice"], account)


@dataclass(frozen=True)
class Agreement:
    """What all do.

    Attributes:
        recovery: ``"partial"``: who lost its state loads its own shards, the others keep theirs.
            ``"full"``: all go back to ``step``.
        step: training resumes after this one. Of ``"partial"`` without a survivor: at least.
        source: whose dense part and position all take.
        lost: the workers whose state is gone.
        account: of all together; a worker that has none of its own begins with it.
    """

    recovery: Choice
    step: int
    source: int
    lost: tuple[int, ...]
    account: LossAccount

    @property
    def starts_again(self) -> bool:
        """Whether all return to before the first step, and so need a newly built model."""
        return self.recovery == "full" and self.step == 0


def agree(statuses: Sequence[Status]) -> Agreement:
    """Decide what all workers do; each computes the same from the same statuses.

    The worker that got furthest is the source: a survivor if there is one, else the one with the
    newest snapshot. Of several it is the one of lowest rank. Its choice counts. Full recovery goes
    to the newest point that all stores have (0: none, all start again), and only if a worker lost
    its state.
    """
    ranks = range(len(statuses))
    live = [rank for rank in ranks if statuses[rank].is_live]
    source = max(live or ranks, key=lambda rank: (statuses[rank].step, -rank))
    account = reduce(LossAccount.united, (status.account for status in statuses))
    lost = tuple(rank for rank in ranks if not statuses[rank].is_live)
    chosen = statuses[source]
    if chosen.choice == "full" and lost:
        common = set.intersection(*(set(status.full_points) for status in statuses))
        return Agreement("full", max(common, default=0), 0, lost, account)
    return Agreement("partial", chosen.step, source, lost, account)
