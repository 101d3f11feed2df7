"""The decision how workers recover that met again: a pure function of their statuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Literal

from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.parity.placement import Group
from cpr_ext.distributed.parity.protocol import Report, Verdict, agree_on_state

Choice = Literal["partial", "full", "exact"]


@dataclass(frozen=True)
class Status:
    """What a worker reports about itself when it joins.

    Attributes:
        is_live: it holds the state of its shards in memory.
        step: training steps it has completed; those of its newest snapshot if it is not live.
        full_points: steps of the full-recovery points in its store.
        choice: how to recover, in its opinion.
        account: the losses that it has reported.
        parity: what it reports of parity, if the job has any.
    """

    is_live: bool
    step: int
    full_points: tuple[int, ...]
    choice: Choice
    account: LossAccount
    parity: Report | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        parity = None if self.parity is None else self.parity.to_plain()
        return {**asdict(self), "account": self.account.to_plain(), "parity": parity}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Status:
        """Invert :meth:`to_plain`."""
        points, account = tuple(plain["full_points"]), LossAccount.from_plain(plain["account"])
        parity = None if plain["parity"] is None else Report.from_plain(plain["parity"])
        return cls(plain["is_live"], plain["step"], points, plain["choice"], account, parity)


@dataclass(frozen=True)
class Agreement:
    """What all do.

    Attributes:
        recovery: ``"partial"``: who lost its state loads its own shards, the others keep theirs.
            ``"full"``: all go back to ``step``. ``"exact"``: the same, lost rows by parity.
        step: training resumes after this one. Of ``"partial"`` without a survivor: at least.
        source: whose dense part and position all take.
        lost: the workers whose state is gone.
        account: of all together; a worker that has none of its own begins with it.
        obstacle: why parity does not suffice, if it should.
        reports: of parity, by rank.
        rebuilt_at: of ``"partial"``: the state of which lost rows are rebuilt from parity; None:
            they are read from the store.
    """

    recovery: Choice
    step: int
    source: int
    lost: tuple[int, ...]
    account: LossAccount
    obstacle: str = ""
    reports: tuple[Report, ...] = ()
    rebuilt_at: int | None = None

    @property
    def starts_again(self) -> bool:
        """Whether all return to before the first step, and so need a newly built model."""
        return self.recovery == "full" and self.step == 0


def agree(statuses: Sequence[Status], groups: Sequence[Group] = ()) -> Agreement:
    """Decide what all workers do; each computes the same from the same statuses.

    The worker that got furthest is the source: a survivor if there is one, else the one with the
    newest snapshot. Of several it is the one of lowest rank. Its choice counts. Full recovery goes
    to the newest point that all stores have (0: none, all start again), and only if a worker lost
    its state. Exact recovery goes to the newest state that parity allows; else recovery is partial.
    Partial recovery takes lost rows from parity where it can.

    Args:
        groups: the parity groups, if there are any.
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
    verdict = Verdict(None)
    reports = tuple(status.parity or Report(None) for status in statuses)
    if groups and live and (lost or chosen.choice == "exact"):
        verdict = agree_on_state(reports, groups)
    if chosen.choice == "exact" and verdict.state is not None:
        return Agreement("exact", verdict.state, source, lost, account, reports=reports)
    rest = verdict.obstacle, reports, verdict.state
    return Agreement("partial", chosen.step, source, lost, account, *rest)
