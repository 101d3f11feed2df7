"""The exploration of a worker that trains while it is rebuilt: rows are decoded at any moment.

A step looks up, and changes, one part of each worker's rows.
"""

from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.protocol import PARITY
from python_tests.distributed.parity.exploration import (
    TORN,
    FaultError,
    Memory,
    Model,
    replaced,
    with_worker,
)


class ServingModel(Model):
    """Lost parts are decoded one by one, while all train; then parity that the worker held."""

    def __init__(self, groups, steps, losses, the_rules=None):
        super().__init__(groups, steps, losses, the_rules, behind=True)
        for values in self.values.values():
            for step in range(1, steps + 1):
                part = self.part_of(step, len(values[0]))
                values[step] = replaced(values[step - 1], part, values[step][part])

    @staticmethod
    def part_of(step, parts):
        """The part that a step changes."""
        return step % parts

    def first(self):
        state = super().first()
        return state._replace(workers=tuple(w._replace(is_encoded=True) for w in state.workers))

    def lose(self, state, rank):
        """A worker that lacks rows counts as lost whenever another one is."""
        for other, w in enumerate(state.workers):
            if w.missing and self.rules.counts_as_lost:
                gone = Memory(None, False, 0, (0,) * len(w.parts), 0, ())
                state = with_worker(state, other, gone)
        return super().lose(state, rank)

    def decode(self, state, group, lost):
        parts = state.workers[lost].parts
        begun = state.workers[lost]._replace(
            own=protocol.begin(state.goal), missing=frozenset(range(len(parts)))
        )
        return with_worker(state, lost, begun)

    def train(self, state):
        for rank, w in enumerate(state.workers):
            for part in w.missing:
                if (decoded := self.decode_part(state, rank, part)) is not None:
                    yield decoded
        yield from super().train(state)

    def arrive(self, state, member, holder):
        """Deltas are traded when all members have completed a step: else one that waits for rows
        would never see parity of one state."""
        step = state.workers[holder].held[self.others(holder).index(member)].next
        members = [state.workers[rank] for rank in self.group_of[holder]]
        if self.rules.trades_together and any(w.own.newest < step for w in members):
            return None
        return super().arrive(state, member, holder)

    def decode_part(self, state, lost, part):
        holder = self._holders[lost][part]
        held = dict(zip(self.others(holder), state.workers[holder].held, strict=False))
        if (at := self.rules.state_of_parity(held)) is None:
            return None
        group, value = self.group_of[lost], 0
        for rank in group:
            given = self.rules.contribution(group, rank, holder, lost)
            if given == PARITY:
                value ^= state.workers[rank].parity
            elif given is not None:
                value ^= self.part_at(state.workers[rank], rank, at)[given]
        w = state.workers[lost]
        if value != self.values[lost][w.own.newest][part]:
            raise FaultError(f"a part was decoded that is not the one of state {w.own.newest}")
        known = w._replace(parts=replaced(w.parts, part, value), missing=w.missing - {part})
        return with_worker(state, lost, known)

    def part_at(self, w, rank, state):
        """A worker's parts as of a state, without changing them."""
        if not self.rules.reads_before:
            return w.parts
        parts = self.values[rank][w.own.newest] if w.is_changing else w.parts
        for step in self.rules.undo_order(w.own, state):
            was, now = self.values[rank][step], self.values[rank][step - 1]
            parts = tuple(p ^ a ^ b for p, a, b in zip(parts, was, now, strict=True))
        return parts

    def changed(self, rank, w, step):
        """A worker's memory in the middle of a step; None: it needs a part that is missing."""
        part = self.part_of(step, len(w.parts))
        if part in w.missing and self.rules.waits_for_rows:
            return None
        return w._replace(is_changing=True, parts=replaced(w.parts, part, w.parts[part] ^ TORN))

    def completed(self, rank, w, step):
        """A worker's parts after a step."""
        now = self.values[rank][step]
        return tuple(p if n in w.missing else now[n] for n, p in enumerate(w.parts))
