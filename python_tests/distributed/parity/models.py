"""Smaller models of the parity protocol, and models of what else a worker does meanwhile."""

from cpr_ext.distributed.collective.recovery_decision import Rebuild
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.placement import part_held
from cpr_ext.distributed.parity.protocol import PARITY
from python_tests.distributed.parity.exploration import (
    TORN,
    FaultError,
    Memory,
    Model,
    replaced,
    with_worker,
)

GONE = 1 << 30  # in place of a state: what a hand wrote went with its worker
HAND = 0x3C3C3C3C  # what a hand changes in a worker's rows


class SilentModel(Model):
    """The events of a job, without acknowledgements: fewer states that stand for all.

    An acknowledgement only permits changes. No loss can tell whether it came. It comes at once; and
    where all return to a state, it is forgotten.
    """

    def next_states(self, state):
        for other in super().next_states(state):
            yield other if other is None else self.silenced(other)

    def first(self):
        return self.silenced(super().first())

    def silenced(self, state):
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


class ServingModel(Model):
    """A worker trains while it is rebuilt: lost parts are decoded one by one, at any moment, and
    then the parity that it held. A step looks up, and changes, one part of each worker's rows.
    """

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


class HandModel(LockStepModel):
    """At most one worker's rows are written by a hand, between any two events.

    The worker learns of it as it completes its step, and accepts its rows then or a step later. Its
    group encodes its parity again.
    """

    def __init__(self, *given, **options):
        super().__init__(*given, behind=True, **options)

    def next_states(self, state):
        yield from super().next_states(state)
        if state.goal is None and all(w.hand is None for w in state.workers):
            for rank, w in enumerate(state.workers):
                if not w.is_changing:
                    written = tuple(part ^ HAND for part in w.parts)
                    hand = w._replace(parts=written, hand=w.own.newest + 1, obstacle="by hand")
                    yield with_worker(state, rank, hand)

    def rows_at(self, rank, w, step):
        has_it = w.hand is not None and step >= w.hand
        return tuple(part ^ HAND * has_it for part in self.values[rank][step])

    def completed(self, rank, w, step):
        has_it = w.hand not in (None, GONE)
        return tuple(part ^ HAND * has_it for part in self.values[rank][step])

    def tell(self, w):
        if not w.obstacle:
            sound = self.rules.soundness("", wants_encoding=False)
            return (w._replace(told=sound),)
        log = w.own
        if self.rules.shortens_log:
            log = log.__class__(log.newest, log.newest)
        accepted = self.rules.soundness("", wants_encoding=True)
        accepts = w._replace(own=log, obstacle="", spoiled=w.obstacle, told=accepted)
        later = self.rules.soundness(w.obstacle, wants_encoding=False)
        return (accepts,) if w.told == later else (accepts, w._replace(told=later))

    def encode(self, state):
        """All members take part, and each does so when it has applied the step."""
        encoded = super().encode(state)
        for group in self.groups:
            members = [state.workers[rank] for rank in group]
            if len({log.newest for m in members for log in (m.own, *m.held)}) > 1:
                encoded = [e for e in encoded if all(
                    e.workers[rank] is state.workers[rank] for rank in group)]  # fmt: skip
        yield from encoded

    def may_acknowledge(self, memory, holder, member, step):
        return False  # it comes at once

    def _newest_acknowledged(self, state, rank):
        """Every member has applied the step, the worker itself too: it is one thread."""
        known = [log.newest for m in self.group_of[rank] for log in state.workers[m].held]
        return max(state.workers[rank].acknowledged, min([*known, state.workers[rank].own.newest]))

    def arrive(self, state, member, holder):
        group = self.group_of[holder]
        if (arrived := super().arrive(state, member, holder)) is None:
            return None
        told = [state.workers[rank].told for rank in group]
        known = arrived.workers[holder]
        step = known.held[0].newest
        if self.rules.encodes_again(told):
            again = tuple(log.__class__(step, step) for log in known.held)
            known = known._replace(held=again, parity=0, is_encoded=False, spoiled="")
        elif any(one != self.rules.soundness("", wants_encoding=False) for one in told):
            known = known._replace(spoiled=known.spoiled or "by a hand")
        return with_worker(arrived, holder, known)

    def decode(self, state, group, lost):
        w = state.workers[lost]
        is_gone = w.hand is not None and w.hand > state.goal
        if is_gone:  # parity was encoded after the hand, which nobody had noticed
            parts = self.decoded(state, group, lost)
            right = self.rows_at(lost, w, state.goal)
            if any(a == b ^ HAND for a, b in zip(parts, right, strict=True)):
                return None  # the checksums that a peer has say so: all take the store
        if is_gone:
            state = with_worker(state, lost, w._replace(hand=GONE))
        return super().decode(state, group, lost)

    def rebuild_without_return(self, state):
        """Those of each group that can, whatever another one lacks or says."""
        reports, decision = self.reports(state), self.decide(state, "partial")
        steps = [step for step in decision.steps if isinstance(step, Rebuild)]
        able = [group for step in steps for group in step.groups]
        for group in self.hurt(reports):
            if group not in able:
                self.require_reason(reports, group, decision)
        for step in steps:
            at = state._replace(goal=step.state)
            for rank in (rank for group in able for rank in group):
                while (undone := self.undo(at, rank)) is not None:
                    at = with_worker(at, rank, undone)
            for rank in step.lost:
                self.decode(at, self.group_of[rank], rank)

    def hurt(self, reports):
        return [group for group in self.groups if any(reports[r].own is None for r in group)]

    def require_reason(self, reports, group, decision):
        """A group takes the store for its own obstacle or losses, or as no state is common."""
        is_whole = sum(reports[r].own is None or not reports[r].held for r in group) == 1
        has_obstacle = any(reports[rank].obstacle for rank in group)
        is_live = any(report.own is not None for report in reports)
        if is_whole and not has_obstacle and is_live and "can return" not in decision.obstacle:
            raise FaultError(f"a group that is whole takes the store: {decision.obstacle}")

    def require_excuse(self, state, obstacle):
        reports = self.reports(state)
        steps = self.decide(state, "partial").steps
        able = [group for step in steps if isinstance(step, Rebuild) for group in step.groups]
        is_rebuilt = all(group in able for group in self.hurt(reports))
        if not is_rebuilt and not any(report.obstacle for report in reports):
            super().require_excuse(state, obstacle)

    def check(self, state):
        if state.goal is not None:
            return
        for rank, w in enumerate(state.workers):
            group = self.group_of[rank]
            if not w.held or not w.is_encoded or w.spoiled or self.is_pending(state, group):
                continue
            value = 0
            for member, log in zip(self.others(rank), w.held, strict=True):
                parts = self.rows_at(member, state.workers[member], log.newest)
                value ^= parts[self.part_number(rank, member)]
            if w.parity != value:
                raise FaultError(f"the parity on worker {rank} is of no state")
        is_over = all(
            w.own.newest == self.steps and not w.is_changing
            and all(log.newest == self.steps for log in w.held) for w in state.workers
        )  # fmt: skip
        for rank, w in enumerate(state.workers):
            hands = [state.workers[member].hand for member in self.group_of[rank]]
            written = [hand for hand in hands if hand not in (None, GONE)]
            if is_over and w.spoiled and all(hand < self.steps for hand in written):
                raise FaultError(f"the group of worker {rank} is never protected again")

    def is_pending(self, state, group):
        """A member has not told all holders yet that its rows have changed."""
        return any(
            state.workers[m].obstacle
            or (state.workers[m].hand not in (None, GONE) and any(
                dict(zip(self.others(h), state.workers[h].held, strict=False))[m].newest
                < state.workers[m].hand
                for h in self.others(m) if state.workers[h].held))
            for m in group
        )  # fmt: skip

    def part_number(self, holder, member):
        return part_held(self.group_of[member], holder, member)
