"""What workers agree on, over all they may say of themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.collective.recovery_decision import Rebuild, Status, decide
from cpr_ext.distributed.defaults import require_planned_parity
from cpr_ext.distributed.parity.options import Parity
from cpr_ext.distributed.parity.protocol import Log, Report
from cpr_ext.errors import StoreError, UsageError
from cpr_ext.saving.schedules import EverySeconds, RunCosts
from cpr_ext.wings.policy import ParityCosts
from cpr_ext.wings.policy.target_pls import TargetPLS


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 6))
    status = st.builds(
        Status,
        is_live=st.booleans(),
        step=st.integers(0, 20),
        full_points=st.lists(st.integers(1, 8), unique=True).map(tuple),
        choice=st.sampled_from(["partial", "full"]),
        account=st.lists(st.integers(0, 9), min_size=size, max_size=size).map(
            lambda held: LossAccount.empty(size).add(held, 9)
        ),
        has_tried=st.booleans(),
        num_snapshots=st.integers(0, 3),
    )
    return draw(st.lists(status, min_size=size, max_size=size))


@given(worlds())
def test_workers_agree_on_the_newest_that_each_recovery_can_give(statuses):
    """Nobody is sent back unless somebody lost its state or began a step."""
    assert [Status.from_plain(status.to_plain()) for status in statuses] == statuses
    decision = decide(statuses)
    assert decision.lost == tuple(r for r, status in enumerate(statuses) if not status.is_live)
    has_tried = any(status.has_tried for status in statuses)
    assert decision.lost or has_tried or decision.recovery == "partial"
    if has_tried and statuses[decision.source].choice == "full":
        assert decision.recovery == "full" or decision.step > 0
    if decision.recovery == "full":  # the newest point that all have
        common = set.intersection(*(set(status.full_points) for status in statuses))
        assert decision.step == max(common, default=0)
        return
    survivors = [status for status in statuses if status.is_live]
    furthest = max(status.step for status in survivors or statuses)
    assert decision.step == furthest == statuses[decision.source].step
    assert statuses[decision.source].is_live or not survivors
    for status in statuses:
        assert decision.account.united(status.account) == decision.account


def full(*points, num_snapshots, step=23, **known):
    """Statuses of survivors with these points in their stores."""
    numbers = num_snapshots if isinstance(num_snapshots, tuple) else (num_snapshots,) * len(points)
    return [
        Status(
            is_live=True, step=step, full_points=own, choice="full", num_snapshots=number,
            account=LossAccount.empty(len(points)), **known,
        )
        for own, number in zip(points, numbers, strict=True)
    ]  # fmt: skip


def test_full_recovery_goes_back_after_a_hang_of_which_nobody_died():
    decision = decide(full((10, 20), (10,), num_snapshots=2, has_tried=True))
    assert (decision.recovery, decision.step, decision.lost) == ("full", 10, ())
    assert decision.steps_repeated == 13
    assert decide(full((10, 20), (10,), num_snapshots=2)).recovery == "partial"


@pytest.mark.parametrize(
    ("points", "num_snapshots", "is_refused"),
    [
        (((10, 20), ()), (2, 0), True),  # another disk is there in place of the one with points
        (((10, 20), (5,)), (2, 1), True),  # one lags
        (((20,), ()), (2, 0), True),
        (((10,), ()), (1, 0), False),  # the first point is on its way to the other store
        (((), ()), (0, 0), False),
        (((), ()), (3, 2), False),  # no store has a point that could be abandoned
        (((10, 20), (10,)), (2, 1), False),
    ],
)
def test_points_are_not_abandoned_for_a_start_at_step_0(points, num_snapshots, is_refused):
    require_wanted_start = recovery_decision.require_wanted_start
    decision = decide(full(*points, num_snapshots=num_snapshots, has_tried=True))
    if not is_refused:
        return require_wanted_start(decision)
    known = "; ".join(
        f"worker {rank}: {', '.join(map(str, own)) or 'none'}" for rank, own in enumerate(points)
    )
    with pytest.raises(StoreError, match=f"no full-recovery point .*{known}.*start_over=True"):
        require_wanted_start(decision)


def with_parity(choice, *newest):
    """Statuses of workers of one group; None: it is lost."""
    group = tuple(range(len(newest)))
    steps = [step for step in newest if step is not None] or [1]
    held = {rank: Log(min(steps), min(steps) - 1) for rank in group}
    statuses = [
        Status(
            step is not None, step or 0, (), choice, LossAccount.empty(len(newest)),
            Report(None) if step is None else Report(
                Log(step, step - 2), {other: log for other, log in held.items() if other != rank}
            ),
        )
        for rank, step in enumerate(newest)
    ]  # fmt: skip
    return decide(statuses, [group])


@pytest.mark.parametrize(
    ("choice", "newest", "expected"),
    [
        ("exact", (7, None, 6), ("exact", 6, None, "")),
        ("exact", (7, 6, 6), ("exact", 6, None, "")),
        ("partial", (7, None, 6), ("partial", 7, 6, "")),
        ("partial", (7, 6, 6), ("partial", 7, None, "")),  # nobody needs to go back
        ("partial", (None, None, 6), ("partial", 6, None, "workers [0, 1] of one parity group")),
        ("exact", (None, None, 6), ("partial", 6, None, "workers [0, 1] of one parity group")),
        ("partial", (None, None, None), ("partial", 0, None, "")),
    ],
)
def test_parity_gives_lost_rows_where_it_suffices(choice, newest, expected):
    decision = with_parity(choice, *newest)
    visits = [s.state for s in decision.steps if isinstance(s, Rebuild) and s.visits]
    *facts, obstacle = expected
    assert [decision.recovery, decision.step, next(iter(visits), None)] == facts
    assert decision.obstacle.startswith(obstacle)
    assert bool(decision.obstacle) == bool(obstacle)


def test_a_plan_with_parity_needs_a_worker_with_parity():
    """Else snapshots would be as rare as if peers could rebuild what is lost."""
    options = {"mtbf_hours": 10, "num_shards": 4, "total_hours": 1000}
    costs = ParityCosts(4, steady_share=0.0, rebuild_hours=0.001)
    schedule = TargetPLS(0.001, **options, parity=costs)
    schedule.observe(RunCosts(num_shards=1, fraction=0.125, save_hours=0.5, load_hours=0.001,
                              prioritized_bytes=1e9))  # fmt: skip
    assert schedule.plan.recommended.recovery == "exact"
    for planned in (schedule, schedule | EverySeconds(60)):
        require_planned_parity(planned, Parity())
        with pytest.raises(UsageError, match="this Worker has none: give it parity=Parity"):
            require_planned_parity(planned, None)
    require_planned_parity(TargetPLS(0.001, **options), None)


def test_the_choice_of_the_source_counts():
    ahead = Status(True, 7, (4,), "full", LossAccount.empty(3))
    behind = Status(True, 6, (4,), "partial", LossAccount.empty(3))
    lost = Status(False, 0, (2, 4), "partial", LossAccount.empty(3))
    decision = decide([behind, lost, ahead])
    assert (decision.recovery, decision.step) == ("full", 4)
