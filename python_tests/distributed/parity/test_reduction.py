"""Each reduction of the exploration, compared with the exploration without it on small cases."""

from functools import cache
from itertools import permutations, product

import pytest

from python_tests.distributed.parity.exploration import explore, mirrors, one_group
from python_tests.distributed.parity.reduction import LockStepModel, ReducedModel

ALL = ("symmetry", "silent", "commuting")
CASES = [
    (one_group(2), 2, 1),
    (one_group(2), 1, 2),
    (one_group(3), 1, 2),
    (mirrors(4), 1, 1),
]
ENCODED_LATER = (one_group(3), 1, 1)


class Noting:
    """Notes the states that are explored, and those in which nothing more happens."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.seen, self.ends, self.resumed = set(), set(), set()

    def next_states(self, state):
        self.seen.add(state)
        reached = list(super().next_states(state))
        if not reached:
            self.ends.add(state)
        if state.goal is not None:
            self.resumed |= {other for other in reached if other and other.goal is None}
        return reached


class Visited(Noting, ReducedModel):
    pass


class VisitedInLockStep(Noting, LockStepModel):
    pass


@cache
def visited(case, *reductions, behind=False, make=Visited):
    model = make(*case, reductions=reductions, behind=behind)
    model.fallbacks = explore(model).fallbacks
    return model


def least_of_all_orders(model, state):
    """A state's logs with its workers renamed in every way that keeps them in their groups."""
    described = []
    for orders in product(*(permutations(group) for group in model.groups)):
        name = {rank: n for n, rank in enumerate(rank for order in orders for rank in order)}
        workers = {}
        for rank, w in enumerate(state.workers):
            held = dict(zip(model.others(rank), w.held, strict=False))
            renamed = sorted((name[m], log.newest, log.oldest) for m, log in held.items())
            own = (-1, -1) if w.own is None else (w.own.newest, w.own.oldest)
            workers[name[rank]] = (own, w.is_changing, w.acknowledged, w.is_encoded, renamed)
        described.append(repr(sorted(workers.items())))
    return state.losses, state.goal, min(described)


@pytest.mark.parametrize("case", CASES)
def test_symmetry_leaves_one_of_all_permuted_states(case):
    every, some = visited(case), visited(case, "symmetry")
    classes = {least_of_all_orders(every, state) for state in every.seen}
    assert {least_of_all_orders(every, state) for state in some.seen} == classes
    assert len(some.seen) == len(classes) < len(every.seen)


@pytest.mark.parametrize("case", CASES)
def test_acknowledgements_that_come_at_once_hide_no_state(case):
    every, some = visited(case), visited(case, "silent")
    silenced = ReducedModel(*case, reductions=["silent"]).silenced
    assert {silenced(state) for state in every.seen} == some.seen
    assert len(some.seen) < len(every.seen)


@pytest.mark.parametrize("case", CASES)
def test_after_the_last_loss_one_order_reaches_what_all_do(case):
    losses = case[2]
    every, some = visited(case), visited(case, "commuting")

    def before(model):
        return {state for state in model.seen if state.losses < losses}

    assert before(every) == before(some)
    assert every.ends == some.ends
    assert every.resumed == some.resumed
    assert some.seen < every.seen


@pytest.mark.parametrize("case", CASES)
def test_all_reductions_together_keep_recoveries_ends_and_fallbacks(case):
    every, some = visited(case), visited(case, *ALL)

    def kept(states):
        return {some.key(some.silenced(state)) for state in states}

    assert kept(every.ends) == kept(some.ends)
    assert kept(every.resumed) == kept(some.resumed)
    assert (every.fallbacks > 0) == (some.fallbacks > 0) == (case[2] > 1)


@pytest.mark.parametrize("case", CASES)
def test_deltas_that_are_traded_in_lock_step_reach_nothing_else(case):
    every, some = visited(case), visited(case, make=VisitedInLockStep)
    assert some.seen < every.seen
    assert some.ends == every.ends
    assert some.resumed <= every.resumed
    assert (every.fallbacks > 0) == (some.fallbacks > 0)


@pytest.mark.parametrize("reductions", [("symmetry",), ("silent",), ALL])
def test_parity_that_is_encoded_during_training_is_explored_as_without(reductions):
    every = visited(ENCODED_LATER, behind=True)
    some = visited(ENCODED_LATER, *reductions, behind=True)
    model = ReducedModel(*ENCODED_LATER, reductions=reductions, behind=True)

    def kept(states):
        return {least_of_all_orders(every, model.silenced(state)) for state in states}

    assert kept(every.seen) == kept(some.seen)
    assert kept(every.resumed) == kept(some.resumed)
    assert len(some.seen) < len(every.seen)


def test_a_state_whose_values_are_wrong_is_not_merged_with_others():
    model = ReducedModel(one_group(3), 1, 1)
    state = model.first()
    worker = state.workers[1]
    wrong = state._replace(
        workers=(state.workers[0], worker._replace(parity=worker.parity ^ 1), state.workers[2])
    )
    assert model.key(wrong) == wrong
    assert model.key(state) != state
