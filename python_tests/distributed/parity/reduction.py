"""Fewer states that stand for all: the exploration of the parity protocol, reduced.

Three reductions, each of which a test compares with the unreduced exploration:

- *Symmetry*: a permutation of a group's workers leads to a state with the same future. One of all
  permuted states is explored.
- *Silent moves*: an acknowledgement only permits changes. No loss can tell whether it came. It
  comes at once; and where all return to a state, it is forgotten.
- *Commuting moves*: once no further loss may come, events permit and never prevent each other. One
  order stands for all.
"""

from __future__ import annotations

from itertools import permutations, product

from python_tests.distributed.parity.exploration import TORN, Model, State, with_worker


class ReducedModel(Model):
    """The events of a job, without those that show nothing new.

    Args:
        reductions: which to apply.
    """

    def __init__(self, *given, reductions=("symmetry", "silent", "commuting"), **options):
        super().__init__(*given, **options)
        self.reductions = frozenset(reductions)
        self._known = {}

    def next_states(self, state):
        for other in super().next_states(state):
            yield other if other is None else self.silenced(other)

    def first(self):
        return self.silenced(super().first())

    def train(self, state):
        return self._one_of_commuting(state, super().train(state))

    def recover(self, state):
        return self._one_of_commuting(state, super().recover(state))

    def _one_of_commuting(self, state, events):
        # Encoding during training needs that members stand still: there moves do prevent others.
        if state.losses < self.losses or self.behind or "commuting" not in self.reductions:
            yield from events
        else:
            yield from (first for first in [next(iter(events), None)] if first is not None)

    def silenced(self, state: State) -> State:
        """Let everything be acknowledged that may be; forget it where all return to a state."""
        if "silent" not in self.reductions:
            return state
        if state.goal is not None:
            forgotten = tuple(w._replace(acknowledged=0) for w in state.workers)
            return state._replace(workers=forgotten)
        for rank, worker in enumerate(state.workers):
            if (step := self._newest_acknowledged(state, rank)) != worker.acknowledged:
                state = with_worker(state, rank, worker._replace(acknowledged=step))
        return state

    def _newest_acknowledged(self, state, rank):
        w = state.workers[rank]
        step = w.acknowledged
        while step < w.own.newest and all(
            self.may_acknowledge(state.workers[holder], holder, rank, step + 1)
            for holder in self.others(rank)
        ):
            step += 1
        return step

    def key(self, state):
        """Return a description that states share which a permutation maps onto each other.

        Values that do not follow from the logs are the protocol's fault; such a state stays itself.
        """
        if "symmetry" not in self.reductions:
            return state
        workers = [self._described(rank, w) for rank, w in enumerate(state.workers)]
        if None in workers:
            return state
        groups = tuple(_least([workers[rank] for rank in group]) for group in self.groups)
        return state.losses, state.goal, groups

    def _described(self, rank, w):
        """Return a worker as numbers, own and for each member of its group; None: irregular."""
        if (rank, w) not in self._known:
            known = self._is_regular(rank, w) and self._numbers(rank, w)
            self._known[rank, w] = known or None
        return self._known[rank, w]

    def _is_regular(self, rank, w):
        if w.own is None:
            parts = (0,) * (len(self.group_of[rank]) - 1)
        else:
            parts = self.values[rank][w.own.newest]
            if w.is_changing:
                parts = (parts[0] ^ TORN, *parts[1:])
        held = {m: log.newest for m, log in zip(self.others(rank), w.held, strict=False)}
        return w.parts == parts and w.parity == self.right_parity(rank, held)

    def _numbers(self, rank, w):
        held = dict(zip(self.others(rank), w.held, strict=False))
        own = (_number(w.own), w.is_changing, w.acknowledged, w.is_encoded)
        return own, tuple(_number(held.get(member)) for member in self.group_of[rank])


class LockStepModel(ReducedModel):
    """Deltas as running workers exchange them: a holder applies those of all members, or none.

    ``Sender`` holds a lock while it does, and nobody asks for a worker's state meanwhile.
    """

    def arrive(self, state, member, holder):
        if member != self.others(holder)[0]:
            return None
        step = state.workers[holder].held[0].next
        if any(state.workers[rank].own.newest < step for rank in self.group_of[holder]):
            return None
        for other in self.others(holder):
            state = super().arrive(state, other, holder)
        return state


def _least(workers):
    """The least description of a group over the orders of its workers."""
    size = range(len(workers))
    rows = [row for _, row in workers]
    # What no permutation changes sorts the workers; only equal ones are permuted.
    marks = [(workers[n][0], sorted(rows[n]), sorted(row[n] for row in rows)) for n in size]
    order = sorted(size, key=marks.__getitem__)
    runs = [[order[0]]]
    for n in order[1:]:
        if marks[n] == marks[runs[-1][0]]:
            runs[-1].append(n)
        else:
            runs.append([n])
    own = tuple(workers[n][0] for n in order)
    if len(runs) == len(order):
        return own, tuple([rows[h][m] for h in order for m in order])
    orders = [
        [n for run in choice for n in run]
        for choice in product(*map(list, map(permutations, runs)))
    ]
    return own, min(tuple([rows[h][m] for h in p for m in p]) for p in orders)


def _number(log):
    return -1 if log is None else 64 * log.newest + log.oldest
