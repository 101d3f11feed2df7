"""The parity protocol in every interleaving; each planted mistake is found by the same search."""

from dataclasses import replace

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
from python_tests.distributed.parity.hand_model import HandModel
from python_tests.distributed.parity.reduction import LockStepModel, ReducedModel
from python_tests.distributed.parity.serving_model import ServingModel


def report(name, result):
    print(f"{name}: {result.states} states, {result.recoveries} recoveries")
    return result


def test_every_interleaving_of_three_workers_keeps_the_promise():
    """Steps, deltas, acknowledgements, a loss, and a second one while the first is made good."""
    result = report("three, 1 step, 2 losses", explore(Model(one_group(3), 1, 2)))
    assert result.states > 2000
    assert result.recoveries > 0
    assert result.fallbacks > 0


@pytest.mark.parametrize(
    ("groups", "steps", "losses", "states"),
    [
        (one_group(3), 2, 2, 1233),
        pytest.param(one_group(3), 3, 1, 1298, marks=pytest.mark.long),
        pytest.param(one_group(4), 1, 1, 1290, marks=pytest.mark.long),
        pytest.param(mirrors(4), 3, 1, 3025, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_reduced_keeps_the_promise(groups, steps, losses, states):
    name = f"{groups}, {steps} steps, {losses} losses"
    result = report(name, explore(ReducedModel(groups, steps, losses)))
    assert result.states == states
    assert result.recoveries > 0
    assert (result.fallbacks > 0) == (losses > 1)  # one loss never needs the store


@pytest.mark.parametrize(
    ("groups", "steps", "losses", "behind", "states"),
    [
        (one_group(3), 3, 2, False, 762),
        (one_group(4), 3, 2, False, 1833),
        (one_group(4), 2, 2, True, 1566),
        pytest.param(mirrors(4), 3, 2, False, 19_626, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_in_lock_step_keeps_the_promise(groups, steps, losses, behind, states):
    """Deltas as running workers exchange them: four workers, three steps, two losses."""
    name = f"lock step: {groups}, {steps} steps, {losses} losses, {behind=}"
    result = report(name, explore(LockStepModel(groups, steps, losses, behind=behind)))
    assert result.states == states
    assert result.recoveries > 0
    assert result.fallbacks > 0


@pytest.mark.long
def test_every_interleaving_with_parity_encoded_behind_training_keeps_the_promise():
    result = report("behind", explore(Model(one_group(3), 1, 2, behind=True)))
    assert result.states > 2000
    assert result.recoveries > 0
    assert result.fallbacks > 0
    mirror = report("mirror, behind", explore(Model(one_group(2), 3, 2, behind=True)))
    assert mirror.recoveries > 0


@pytest.mark.parametrize(
    ("groups", "steps", "losses", "states"),
    [
        (one_group(2), 3, 1, 780),
        (one_group(2), 2, 2, 717),
        (one_group(3), 1, 1, 2354),
        pytest.param(one_group(3), 2, 1, 7640, marks=pytest.mark.long),
        pytest.param(one_group(3), 1, 2, 4620, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_of_a_rebuild_during_training_keeps_the_promise(
    groups, steps, losses, states
):
    """Rows are decoded one by one, between any two events, for who waits for them."""
    name = f"during training: {groups}, {steps} steps, {losses} losses"
    result = report(name, explore(ServingModel(groups, steps, losses)))
    assert result.states == states
    assert result.recoveries > 0
    assert (result.fallbacks > 0) == (losses > 1)


@pytest.mark.parametrize(
    ("groups", "steps", "losses", "states"),
    [
        (one_group(2), 3, 1, 4680),
        (one_group(3), 2, 1, 16_131),
        pytest.param(mirrors(4), 1, 1, 62_300, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_with_rows_written_by_hand_keeps_the_promise(
    groups, steps, losses, states
):
    """At any moment; the group encodes its parity again, and no other group takes the store."""
    name = f"by hand: {groups}, {steps} steps, {losses} losses"
    result = report(name, explore(HandModel(groups, steps, losses)))
    assert result.states == states
    assert result.recoveries > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("groups", "steps", "losses", "states"),
    [(one_group(3), 3, 2, 277_104), (mirrors(4), 3, 1, 198_253), (one_group(4), 1, 1, 46_281)],
)
def test_every_interleaving_of_more_steps_and_workers(groups, steps, losses, states):
    model = Model(groups, steps, losses, atomic_undo=len(groups) > 1 or len(groups[0]) > 3)
    result = report(f"{groups}, {steps} steps, {losses} losses", explore(model))
    assert result.states == states


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("groups", "steps", "losses", "behind", "states"),
    [
        (one_group(3), 3, 2, False, 15_058),
        (one_group(4), 3, 1, False, 29_853),
        (one_group(4), 2, 2, False, 63_857),
        (one_group(3), 2, 2, True, 5_156),
        (one_group(4), 1, 1, True, 19_101),
    ],
)
def test_every_interleaving_of_more_steps_and_workers_reduced(
    groups, steps, losses, behind, states
):
    model = ReducedModel(groups, steps, losses, behind=behind)
    result = report(f"{groups}, {steps} steps, {losses} losses, {behind=}", explore(model))
    assert result.states == states


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_every_interleaving_of_four_workers_three_steps_and_two_losses():
    """An hour, and 2.5 GB."""
    result = report("four, 3 steps, 2 losses", explore(ReducedModel(one_group(4), 3, 2)))
    assert (result.states, result.recoveries, result.fallbacks) == (5_298_601, 825, 514_371)


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


THREE = {"groups": one_group(3), "steps": 2, "losses": 1}
TWO_LOSSES = {"groups": one_group(3), "steps": 1, "losses": 2}
MIRRORS = {"groups": mirrors(4), "steps": 3, "losses": 1, "atomic_undo": True}
SEVERAL_UNDONE = {"groups": mirrors(4), "steps": 2, "losses": 2, "deep": True}
PAIR = {"groups": one_group(2), "steps": 3, "losses": 1}


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"times_applied": 2}, THREE),
        ({"may_change": lambda own, acknowledged: True}, PAIR),
        ({"may_acknowledge": lambda held, step: True}, PAIR),
        ({"append": forgets_a_log}, MIRRORS),
        ({"undoes_parity": False}, THREE),
        ({"undoes_change": False}, THREE),
        ({"undo_order": in_the_wrong_order, "undone": undone_unchecked}, SEVERAL_UNDONE),
        ({"undo_order": in_the_wrong_order}, SEVERAL_UNDONE),
        ({"agree_on_state": agrees_on_the_newest}, THREE),
        ({"agree_on_state": agrees_without_holders}, THREE),
        ({"agree_on_state": agrees_without_parity}, TWO_LOSSES),
        ({"agree_on_state": agrees_without_parity}, {**TWO_LOSSES, "behind": True}),
        ({"contribution": leaves_a_member_out}, THREE),
        ({"contribution": gives_another_part}, THREE),
        ({"to_encode": lambda reports, group: []}, TWO_LOSSES),
        ({"decide": without(Return)}, THREE),
        ({"decide": without(Rebuild)}, THREE),
        ({"decide": without(Encode)}, THREE),
        ({"to_decode": lambda lost, group: protocol.to_decode(lost, group)[:-1]}, THREE),
    ],
    ids=[
        "a delta is applied twice",
        "the acknowledgement is skipped",
        "it is acknowledged before it is applied",
        "a log is forgotten too early",
        "parity is not undone",
        "a step in progress is not undone",
        "undo in the wrong order",
        "undo in the wrong order, checked",
        "the newest state is agreed on",
        "holders are not asked",
        "parity counts before it is encoded",
        "parity counts before it is encoded during training",
        "a member contributes nothing",
        "a member contributes another part",
        "parity is not encoded again",
        "nobody goes back",
        "nothing is rebuilt",
        "nothing is encoded",
        "a part is not decoded",
    ],
)
def test_a_planted_mistake_is_found(wrong, where):
    """By the reduced exploration, which is the harder one to find it by."""
    options = dict(where)
    groups, steps, losses = (options.pop(name) for name in ("groups", "steps", "losses"))
    deep = options.pop("deep", False)
    with pytest.raises(FaultError):
        explore(ReducedModel(groups, steps, losses, rules(**wrong), **options), deep=deep)


@pytest.mark.long
def test_a_wrong_order_of_undoing_is_found_without_reductions_too():
    wrong = rules(undo_order=in_the_wrong_order)
    groups, steps, losses = (SEVERAL_UNDONE[name] for name in ("groups", "steps", "losses"))
    with pytest.raises(FaultError):
        explore(Model(groups, steps, losses, wrong), deep=True)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"reads_before": False}, (one_group(3), 1, 1)),
        ({"waits_for_rows": False}, (one_group(2), 1, 1)),
        ({"counts_as_lost": False}, (one_group(3), 1, 2)),
        ({"trades_together": False}, (one_group(3), 1, 1)),
        ({"state_of_parity": lambda held: max(log.newest for log in held.values())},
         (one_group(3), 1, 1)),
    ],
    ids=[
        "rows of later than the parity are read",
        "a lookup does not wait",
        "a worker that lacks rows counts as alive",
        "deltas are applied before all have them",
        "deltas in the parity are not of one state",
    ],
)  # fmt: skip
def test_a_mistake_in_a_rebuild_during_training_is_found(wrong, where):
    with pytest.raises(FaultError):
        explore(ServingModel(*where, rules(**wrong)))


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


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"soundness": tells_nothing}, (one_group(2), 2, 1)),
        ({"encodes_again": lambda members: False}, (one_group(2), 2, 0)),
        ({"agree_on_state": agrees_in_spite_of_obstacles}, (one_group(2), 2, 1)),
        ({"shortens_log": False}, (mirrors(4), 1, 1)),
        ({"agree_on_rows": counting_every_obstacle}, (mirrors(4), 2, 1)),
        ({"agree_on_rows": all_or_none}, (mirrors(4), 1, 3)),
    ],
    ids=[
        "an obstacle is not published",
        "parity is not encoded again",
        "obstacles are not asked for",
        "accepted rows can go back",
        "an obstacle counts in every group",
        "a group that cannot rebuild its rows keeps another from it",
    ],
)
def test_a_mistake_with_rows_written_by_hand_is_found(wrong, where):
    with pytest.raises(FaultError):
        explore(HandModel(*where, rules(**wrong)), deep=True)
