"""What workers do that met again: a list of steps, a pure function of what they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, Literal

from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.parity.placement import Group
from cpr_ext.distributed.parity.protocol import (
    Report,
    Verdict,
    agree_on_rows,
    agree_on_state,
    to_encode,
)
from cpr_ext.errors import StoreError, WorkersDifferError

Choice = Literal["partial", "full", "exact"]
_LATER = ("has_tried", "num_snapshots")


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
        has_tried: it has begun a step since it recovered last.
        num_snapshots: the number of the newest snapshot in its store; 0: there is none.
    """

    is_live: bool
    step: int
    full_points: tuple[int, ...]
    choice: Choice
    account: LossAccount
    parity: Report | None = None
    has_tried: bool = False
    num_snapshots: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        parity = None if self.parity is None else self.parity.to_plain()
        return {**asdict(self), "account": self.account.to_plain(), "parity": parity}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Status:
        """Invert :meth:`to_plain`."""
        points, account = tuple(plain["full_points"]), LossAccount.from_plain(plain["account"])
        parity = None if plain["parity"] is None else Report.from_plain(plain["parity"])
        facts = {name: plain[name] for name in ("is_live", "step", "choice", *_LATER)}
        return cls(full_points=points, account=account, parity=parity, **facts)


@dataclass(frozen=True)
class Return:
    """Survivors go back by their own deltas, rows and dense state.

    Attributes:
        state: to where; None: to the newest step that each has completed.
    """

    state: int | None


@dataclass(frozen=True)
class Rebuild:
    """Groups decode the rows of their lost workers from parity, of each group one's at most.

    Attributes:
        state: the one that lost workers get.
        source: whose dense state they get.
        lost: whose rows are rebuilt.
        groups: that take part.
        lacking: whose parity is encoded after it.
        visits: survivors take that state for the time of it; else they are at it.
    """

    state: int
    source: int
    lost: tuple[int, ...]
    groups: tuple[Group, ...]
    lacking: tuple[int, ...]
    visits: bool


@dataclass(frozen=True)
class Read:
    """Who lost its state, and did not get it from peers, reads the newest of its store.

    Attributes:
        point: the full-recovery point that all read in place of that; 0: none.
    """

    point: int | None


@dataclass(frozen=True)
class Broadcast:
    """All take the dense part and the position of one worker, and hear what each lost and read.

    Attributes:
        source: that worker; None: each has its own back.
        buffers: buffers, too.
    """

    source: int | None
    buffers: bool


@dataclass(frozen=True)
class Encode:
    """Each group encodes parity of the rows as they are, and sends deltas from there on.

    Attributes:
        lacking: whose parity.
        begins: there is no way back to an earlier state, nor parity of one.
    """

    lacking: tuple[int, ...]
    begins: bool


@dataclass(frozen=True)
class Compare:
    """Workers compare what they must have in common.

    Attributes:
        buffers: buffers, too.
    """

    buffers: bool


Step = Return | Rebuild | Read | Broadcast | Encode | Compare


@dataclass(frozen=True)
class Decision:
    """What all do.

    Attributes:
        recovery: ``"partial"``: who lost its state loads its own shards, the others keep theirs.
            ``"full"``: all go back to ``step``. ``"exact"``: the same, lost rows by parity.
        step: training resumes after this one. Of ``"partial"`` without a survivor: at least.
        source: whose dense part and position all take.
        lost: the workers whose state is gone.
        account: of all together; a worker that has none of its own begins with it.
        steps: what each does, one after the other.
        obstacle: why parity does not suffice, or not for exact recovery, if it should.
        steps_repeated: completed steps that are trained again.
        points: of full recovery to before the first step: the full-recovery points of each worker.
        forgets_points: such a recovery would abandon points that some workers have.
    """

    recovery: Choice
    step: int
    source: int
    lost: tuple[int, ...]
    account: LossAccount
    steps: tuple[Step, ...]
    obstacle: str = ""
    steps_repeated: int = 0
    points: tuple[tuple[int, ...], ...] = ()
    forgets_points: bool = False

    @property
    def starts_again(self) -> bool:
        """Whether all return to before the first step, and so need a newly built model."""
        return self.recovery == "full" and self.step == 0


def decide(statuses: Sequence[Status], groups: Sequence[Group] = ()) -> Decision:
    """Decide what all workers do; each computes the same from the same statuses.

    The worker that got furthest is the source: a survivor if there is one, else the one with the
    newest snapshot. Of several it is the one of lowest rank. Its choice counts. Full recovery goes
    to the newest point that all stores have (0: none, all start again). It is needed if a worker
    lost its state, or began a step, which may have changed some workers only. Exact recovery goes
    to the newest state that parity allows; else recovery is partial. Partial recovery takes the
    lost rows of each group from its parity, if that suffices.

    Args:
        groups: the parity groups, if there are any.
    """
    ranks = range(len(statuses))
    live = [rank for rank in ranks if statuses[rank].is_live]
    source = max(live or ranks, key=lambda rank: (statuses[rank].step, -rank))
    # Most have the same account.
    account = reduce(LossAccount.united, dict.fromkeys(status.account for status in statuses))
    lost = tuple(rank for rank in ranks if not statuses[rank].is_live)
    chosen = statuses[source]
    furthest = max((statuses[rank].step for rank in live), default=0)
    if chosen.choice == "full" and (lost or any(status.has_tried for status in statuses)):
        points = tuple(tuple(sorted(status.full_points)) for status in statuses)
        step = max(set.intersection(*map(set, points)), default=0)
        # Before the first point is in all stores, some may have it, as their first snapshot.
        is_late = max(status.num_snapshots for status in statuses) > 1
        return Decision(
            *("full", step, 0, lost, account),
            (Read(step), Broadcast(0, buffers=step == 0), Compare(buffers=step == 0)),
            steps_repeated=max(0, furthest - step),
            points=points,
            forgets_points=step == 0 and is_late and any(points),
        )
    verdict = Verdict(None)
    reports = tuple(status.parity or Report(None) for status in statuses)
    if groups and live and chosen.choice == "exact":
        verdict = agree_on_state(reports, groups)
    if chosen.choice == "exact" and verdict.state is not None:
        return Decision(
            *("exact", verdict.state, source, lost, account),
            tuple(_exact_steps(verdict.state, reports, groups)),
            steps_repeated=max(0, furthest - verdict.state),
        )
    if groups and live and lost:
        rows = agree_on_rows(reports, groups)
        verdict = replace(rows, obstacle=rows.obstacle or verdict.obstacle)
    steps: list[Step] = [Read(None), Broadcast(source, buffers=True), Compare(buffers=True)]
    if groups:
        steps.insert(2, Encode(tuple(ranks), begins=True))
        if verdict.state is not None:
            steps.insert(0, _rebuild(verdict.state, reports, verdict.groups, visits=True))
        steps.insert(0, Return(None))
    return Decision("partial", chosen.step, source, lost, account, tuple(steps), verdict.obstacle)


def _exact_steps(state: int, reports: Sequence[Report], groups: Sequence[Group]) -> list[Step]:
    """Return the steps to one state; a loss amid them finds each survivor at a known state."""
    rebuild = _rebuild(state, reports, groups, visits=False)
    encode = Encode(rebuild.lacking, begins=False)
    return [Return(state), rebuild, Broadcast(None, False), encode, Compare(buffers=False)]


def _rebuild(
    state: int, reports: Sequence[Report], groups: Sequence[Group], *, visits: bool
) -> Rebuild:
    ranks = [rank for group in groups for rank in group]
    lost = tuple(rank for rank in ranks if reports[rank].own is None)
    source = next(rank for rank in ranks if rank not in lost)
    lacking = tuple(rank for group in groups for rank in to_encode(reports, group))
    return Rebuild(state, source, lost, tuple(groups), lacking, visits)


def require_wanted_start(decision: Decision) -> None:
    """Raise StoreError if a full recovery would abandon points, because a store lacks them all."""
    if not decision.forgets_points:
        return
    known = "; ".join(
        f"worker {rank}: {', '.join(map(str, points)) or 'none'}"
        for rank, points in enumerate(decision.points)
    )
    raise StoreError(
        f"no full-recovery point is in the stores of all workers ({known}), so full recovery would "
        "start again at step 0 and abandon these. Put the lacking store back (`cpr fetch` reads a "
        'copy), or recover with recovery="partial", or start again with start_over=True'
    )


def agree_on_run(runs: Sequence[tuple[str, str]]) -> str:
    """Return the name of the run of all workers.

    Args:
        runs: of each worker, the name that its store knows (empty: none), and one that it proposes.

    Raises:
        WorkersDifferError: their stores are of different runs.
    """
    known = {rank: run for rank, (run, _) in enumerate(runs) if run}
    if len(set(known.values())) > 1:
        names = "; ".join(f"worker {rank}: {run[:12]}" for rank, run in known.items())
        raise WorkersDifferError(
            f"the stores of the workers are of different runs ({names}), so none trains on. Give "
            "each worker the store of this run, or an empty directory"
        )
    return next(iter(known.values()), runs[0][1])
