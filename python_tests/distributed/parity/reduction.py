"""Fewer states that stand for all: the exploration of the parity protocol, reduced.

An acknowledgement only permits changes. No loss can tell whether it came. It comes at once; and
where all return to a state, it is forgotten.
"""

from __future__ import annotations

from python_tests.distributed.parity.exploration import Model, State, with_worker


class SilentModel(Model):
    """The events of a job, without acknowledgements."""

    def next_states(self, state):
        for other in super().next_states(state):
            yield other if other is None else self.silenced(other)

    def first(self):
        return self.silenced(super().first())

    def silenced(self, state: State) -> State:
        """Let everything be acknowledged that may be; forget it where all return to a state."""
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


class LockStepModel(SilentModel):
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
