"""The parity protocol in every interleaving; each planted mistake is found by the same search."""

from dataclasses import replace
from functools import partial

import pytest

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.distributed.collective.recovery_decision import Encode, Rebuild, Return
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.protocol import PARITY, Log, Soundness, Verdict
from python_tests.distributed.parity.exploration import (
    FaultError,
    Model,
    explore,
    mirrors,
    one_group,
    rules,
)
from python_tests.distributed.parity.models import (
    HandModel,
    LockStepModel,
    ServingModel,
    SilentModel,
)


def hours(*values):
    return pytest.param(*values, marks=[pytest.mark.long, pytest.mark.timeout(1800)])


BEHIND, ATOMIC = {"behind": True}, {"atomic_undo": True}


@pytest.mark.parametrize(
    ("model", "groups", "steps", "losses", "options", "states"),
    [
        # Steps, deltas, acknowledgements, a loss, and a second one while the first is made good.
        (Model, one_group(3), 1, 2, {}, 2496),
        (Model, one_group(3), 1, 2, BEHIND, 6931),
        (Model, one_group(2), 3, 2, BEHIND, 2983),
        hours(Model, one_group(3), 3, 2, {}, 277_104),
        hours(Model, mirrors(4), 3, 1, ATOMIC, 198_253),
        hours(Model, one_group(4), 1, 1, ATOMIC, 46_281),
        (SilentModel, one_group(3), 2, 2, {}, 8652),
        hours(SilentModel, one_group(3), 3, 1, {}, 54_547),
        hours(SilentModel, one_group(3), 2, 2, BEHIND, 22_715),
        # Deltas as running workers exchange them: four workers, three steps, two losses.
        (LockStepModel, one_group(3), 3, 2, {}, 5250),
        (LockStepModel, one_group(4), 2, 2, {}, 8107),
        hours(LockStepModel, one_group(4), 3, 2, {}, 56_972),
        hours(LockStepModel, one_group(4), 2, 2, BEHIND, 14_636),
        # Rows are decoded one by one, between any two events, for who waits for them.
        (ServingModel, one_group(2), 3, 1, {}, 780),
        (ServingModel, one_group(2), 2, 2, {}, 717),
        (ServingModel, one_group(3), 1, 1, {}, 2354),
        hours(ServingModel, one_group(3), 2, 1, {}, 7640),
        hours(ServingModel, one_group(3), 1, 2, {}, 4620),
        # Written by hand at any moment; the group encodes its parity again, no other reads stores.
        (HandModel, one_group(2), 3, 1, {}, 4680),
        (HandModel, one_group(3), 2, 1, {}, 16_131),
        hours(HandModel, mirrors(4), 1, 1, {}, 62_300),
    ],
)
def test_every_interleaving_keeps_the_promise(model, groups, steps, losses, options, states):
    result = explore(model(groups, steps, losses, **options))
    print(f"{result.states} states, {result.recoveries} recoveries")
    assert result.states == states
    assert result.recoveries > 0
    if model is not HandModel:  # one loss never needs the store
        assert (result.fallbacks > 0) == (losses > 1)


def forgets_a_log(log, step):
    return replace(protocol.append(log, step), oldest=max(log.oldest, step - 1))


def in_the_wrong_order(log, state):
    return protocol.undo_order(log, state)[::-1]


def undone_unchecked(log, step):
    return Log(log.newest - 1, log.oldest)


def agrees_on_the_newest(reports, groups):
    verdict = protocol.agree_on_state(reports, groups)
    logs = [log for r in reports if r.own for log in (r.own, *r.held.values())]
    return verdict if verdict.state is None else Verdict(max(log.newest for log in logs))


def agrees_without_holders(reports, groups):
    verdict = protocol.agree_on_state(reports, groups)
    newest = [r.own.newest for r in reports if r.own]
    return verdict if verdict.state is None else Verdict(min(newest))


def agrees_without_parity(reports, groups):
    """As if the parity of a replacement were encoded at once."""
    full = [r if r.own is None else replace(r, held=r.held or {0: r.own}) for r in reports]
    return protocol.agree_on_state(full, groups)


def leaves_a_member_out(group, rank, holder, lost):
    given = protocol.contribution(group, rank, holder, lost)
    return None if rank == max(group) and given != PARITY else given


def gives_another_part(group, rank, holder, lost):
    given = protocol.contribution(group, rank, holder, lost)
    return given if given in (None, PARITY) else (given + 1) % (len(group) - 1)


def without(kind):
    """A list that lacks a step."""

    def decide(statuses, groups):
        decision = recovery_decision.decide(statuses, groups)
        steps = [step for step in decision.steps if not isinstance(step, kind)]
        return replace(decision, steps=tuple(steps))

    return decide


def agrees_in_spite_of_obstacles(reports, groups):
    return protocol.agree_on_state([replace(report, obstacle="") for report in reports], groups)


def with_a_loss(reports, groups):
    return tuple(group for group in groups if any(reports[rank].own is None for rank in group))


def counting_every_obstacle(reports, groups):
    verdict = protocol.agree_on_state(reports, groups)
    return replace(
        verdict, groups=with_a_loss(reports, groups) if verdict.state is not None else ()
    )


def all_or_none(reports, groups):
    hurt = with_a_loss(reports, groups)
    verdict = protocol.agree_on_state(reports, hurt)
    return replace(verdict, groups=hurt if verdict.state is not None else ())


def tells_nothing(obstacle, *, wants_encoding):
    return Soundness.SOUND


THREE = partial(SilentModel, one_group(3), 2, 1)
TWO_LOSSES = partial(SilentModel, one_group(3), 1, 2)
MIRRORS = partial(SilentModel, mirrors(4), 3, 1, atomic_undo=True)
SEVERAL_UNDONE = partial(SilentModel, mirrors(4), 2, 2)
PAIR = partial(SilentModel, one_group(2), 3, 1)
SERVING = partial(ServingModel, one_group(3), 1, 1)
BY_HAND = partial(HandModel, one_group(2), 2, 1)
NEWEST = {"state_of_parity": lambda held: max(log.newest for log in held.values())}
#: name -> where it is found, without acknowledgements as events, and what is wrong
MISTAKES = {
    "a delta is applied twice": (THREE, {"times_applied": 2}),
    "the acknowledgement is skipped": (PAIR, {"may_change": lambda own, acknowledged: True}),
    "it is acknowledged before it is applied": (PAIR, {"may_acknowledge": lambda held, step: True}),
    "a log is forgotten too early": (MIRRORS, {"append": forgets_a_log}),
    "parity is not undone": (THREE, {"undoes_parity": False}),
    "a step in progress is not undone": (THREE, {"undoes_change": False}),
    "undo in the wrong order": (
        SEVERAL_UNDONE, {"undo_order": in_the_wrong_order, "undone": undone_unchecked},
    ),
    "undo in the wrong order, checked": (SEVERAL_UNDONE, {"undo_order": in_the_wrong_order}),
    "the newest state is agreed on": (THREE, {"agree_on_state": agrees_on_the_newest}),
    "holders are not asked": (THREE, {"agree_on_state": agrees_without_holders}),
    "parity counts before it is encoded": (TWO_LOSSES, {"agree_on_state": agrees_without_parity}),
    "parity counts before it is encoded during training": (
        partial(TWO_LOSSES, behind=True), {"agree_on_state": agrees_without_parity},
    ),
    "a member contributes nothing": (THREE, {"contribution": leaves_a_member_out}),
    "a member contributes another part": (THREE, {"contribution": gives_another_part}),
    "lost parity is not encoded": (TWO_LOSSES, {"to_encode": lambda reports, group: []}),
    "nobody goes back": (THREE, {"decide": without(Return)}),
    "nothing is rebuilt": (THREE, {"decide": without(Rebuild)}),
    "nothing is encoded": (THREE, {"decide": without(Encode)}),
    "a part is not decoded": (
        THREE, {"to_decode": lambda lost, group: protocol.to_decode(lost, group)[:-1]},
    ),
    # In a rebuild.
    "rows of later than the parity are read": (SERVING, {"reads_before": False}),
    "a lookup does not wait": (
        partial(ServingModel, one_group(2), 1, 1), {"waits_for_rows": False},
    ),
    "a worker that lacks rows counts as alive": (
        partial(ServingModel, one_group(3), 1, 2), {"counts_as_lost": False},
    ),
    "deltas are applied before all have them": (SERVING, {"trades_together": False}),
    "deltas in the parity are not of one state": (SERVING, NEWEST),
    # With rows that are written by hand.
    "an obstacle is not published": (BY_HAND, {"soundness": tells_nothing}),
    "parity is not encoded again": (
        partial(HandModel, one_group(2), 2, 0), {"encodes_again": lambda members: False},
    ),
    "obstacles are not asked for": (BY_HAND, {"agree_on_state": agrees_in_spite_of_obstacles}),
    "accepted rows can go back": (partial(HandModel, mirrors(4), 1, 1), {"shortens_log": False}),
    "an obstacle counts in every group": (
        partial(HandModel, mirrors(4), 2, 1), {"agree_on_rows": counting_every_obstacle},
    ),
    "a group that cannot rebuild its rows keeps another from it": (
        partial(HandModel, mirrors(4), 1, 3), {"agree_on_rows": all_or_none},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake):
    model, wrong = MISTAKES[mistake]
    with pytest.raises(FaultError):
        explore(model(the_rules=rules(**wrong)), deep=True)


def visited(model, case):
    """All states, those in which nothing more happens, and those in which training resumes."""

    class Noting(model):
        seen, ends, resumed = set(), set(), set()

        def next_states(self, state):
            self.seen.add(state)
            reached = list(super().next_states(state))
            self.ends |= set() if reached else {state}
            if state.goal is not None:
                self.resumed |= {other for other in reached if other and other.goal is None}
            return reached

    noted = Noting(*case)
    noted.fallbacks = explore(noted).fallbacks
    return noted


@pytest.mark.parametrize("case", [(one_group(2), 1, 2), (one_group(3), 1, 2), (mirrors(4), 1, 1)])
def test_fewer_events_hide_no_state_and_reach_nothing_else(case):
    every, silent, traded = (visited(model, case) for model in (Model, SilentModel, LockStepModel))
    assert {silent.silenced(state) for state in every.seen} == silent.seen
    assert traded.seen < silent.seen
    assert traded.ends == silent.ends
    assert traded.resumed <= silent.resumed
    assert (every.fallbacks > 0) == (silent.fallbacks > 0) == (traded.fallbacks > 0)
