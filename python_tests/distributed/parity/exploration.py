"""Every interleaving of the parity protocol of a few workers: the functions that workers call, run
on a model of their memory, breadth first, until nothing new is reached.

A worker's part at a state is a random number; rows, parity and what is decoded are XORs of such.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

from cpr_ext.distributed.collective import recovery_decision
from cpr_ext.distributed.collective.account import LossAccount
from cpr_ext.distributed.collective.recovery_decision import Encode, Rebuild, Return, Status
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.placement import holders, part_held
from cpr_ext.distributed.parity.protocol import PARITY, Log, ProtocolError, Report, Soundness

TORN = 0x5A5A5A5A  # what a half done change leaves in the rows


class Memory(NamedTuple):
    """Of one worker."""

    own: Log | None  # None: a replacement without rows
    is_changing: bool  # an optimizer is in the middle of its step
    acknowledged: int
    parts: tuple[int, ...]
    parity: int
    held: tuple[Log, ...]  # of the other members, in their order; empty: of no state
    is_encoded: bool = True
    missing: frozenset[int] = frozenset()  # parts of a replacement that are not rebuilt yet
    hand: int | None = None  # rows of this state, and of later ones, have what a hand wrote
    obstacle: str = ""  # of its own rows
    told: Soundness = Soundness.SOUND  # with the delta of its newest step
    spoiled: str = ""  # why the parity that it holds must not be used


class State(NamedTuple):
    workers: tuple[Memory, ...]
    losses: int
    goal: int | None  # all return to this state; None: they train
    steps: tuple = ()  # of the recovery, that are left


class FaultError(Exception):
    """The protocol did what it must never do."""


@dataclass
class Result:
    states: int
    recoveries: int
    fallbacks: int


def rules(**wrong):
    """The protocol, some of its functions replaced by wrong ones."""
    right = {
        name: getattr(protocol, name)
        for name in (
            *("append", "undo_order", "undone", "may_change", "may_acknowledge"),
            *("state_of_parity", "to_decode", "contribution", "soundness", "encodes_again"),
        )
    }
    # The decision with its own functions; the wrong ones are called in place of the right.
    names = {**vars(recovery_decision), **wrong}
    for name in ("_rebuild", "_exact_steps", "decide"):
        function = getattr(recovery_decision, name)
        names[name] = FunctionType(function.__code__, names, argdefs=function.__defaults__)
    right["decide"] = names["decide"]
    decides = {"agree_on_state", "agree_on_rows", "to_encode"}
    own = {"times_applied": 1, "undoes_parity": True, "undoes_change": True}
    own |= {"reads_before": True, "waits_for_rows": True, "counts_as_lost": True}
    own |= {"trades_together": True, "shortens_log": True}
    assert wrong.keys() <= right.keys() | own.keys() | decides
    return SimpleNamespace(**{**right, **own, **wrong})


class Model:
    """The events of a job.

    Args:
        groups: the members of each.
        steps: how many are trained.
        losses: how many workers are lost at most.
        atomic_undo: a worker goes all its way back in one event.
        behind: parity is encoded during training, when all members of a group stand still.
    """

    def __init__(self, groups, steps, losses, the_rules=None, *, atomic_undo=False, behind=False):
        self.groups, self.steps, self.losses = groups, steps, losses
        self.rules = the_rules or rules()
        self.atomic_undo, self.behind = atomic_undo, behind
        self.group_of = {rank: group for group in groups for rank in group}
        self.size = len(self.group_of)
        self._others = {
            rank: [other for other in group if other != rank]
            for rank, group in self.group_of.items()
        }
        self._holders = {rank: holders(group, rank) for rank, group in self.group_of.items()}
        chance = random.Random(1)
        self.values = {
            rank: [
                tuple(chance.getrandbits(32) for _ in range(len(group) - 1))
                for _ in range(steps + 1)
            ]
            for rank, group in self.group_of.items()
        }

    def others(self, rank):
        return self._others[rank]

    def first(self):
        fresh = tuple(
            Memory(
                protocol.begin(0), False, 0, self.values[rank][0],
                self.right_parity(rank, dict.fromkeys(self.others(rank), 0)),
                tuple(protocol.begin(0) for _ in self.others(rank)), not self.behind,
            )
            for rank in range(self.size)
        )  # fmt: skip
        return State(fresh, 0, None)

    def right_parity(self, holder, states):
        value = 0
        for member, state in states.items():
            value ^= self.part(holder, member, state)
        return value

    def part(self, holder, member, state):
        return self.values[member][state][part_held(self.group_of[member], holder, member)]

    def delta(self, holder, member, step):
        return self.part(holder, member, step - 1) ^ self.part(holder, member, step)

    def reports(self, state):
        return [
            Report(
                w.own,
                self.held_by(rank, w) if w.is_encoded else {},
                w.obstacle or w.spoiled if w.own else "",
            )
            for rank, w in enumerate(state.workers)
        ]

    def held_by(self, rank, memory):
        return dict(zip(self.others(rank), memory.held, strict=False))

    def next_states(self, state):
        if state.losses < self.losses:
            for rank in range(self.size):
                yield self.lose(state, rank)
        if state.goal is None:
            yield from self.train(state)
        else:
            yield from self.recover(state)

    def lose(self, state, rank):
        gone = Memory(None, False, 0, (0,) * (len(self.group_of[rank]) - 1), 0, (),
                      hand=state.workers[rank].hand)  # fmt: skip
        known = state._replace(workers=tuple(
            w if w.is_encoded else w._replace(held=()) for w in state.workers
        ))  # fmt: skip
        lost = with_worker(known, rank, gone)._replace(losses=state.losses + 1)
        decision = self.decide(lost, "exact")
        if decision.recovery != "exact":
            self.rebuild_without_return(lost)
            self.require_excuse(lost, decision.obstacle)
            return None
        return lost._replace(goal=decision.step, steps=decision.steps)

    def decide(self, state, choice):
        """What workers decide that recover in this way."""
        reports, account = self.reports(state), LossAccount.empty(self.size)
        return self.rules.decide(
            [
                Status(r.own is not None, r.own.newest if r.own else 0, (), choice, account, r)
                for r in reports
            ],
            self.groups,
        )

    def rebuild_without_return(self, state):
        """The lost rows alone, as the survivors do not go back."""

    def require_excuse(self, state, obstacle):
        """Parity may be too little only if two of a group lack rows or parity."""
        for group in self.groups:
            if sum(w.own is None or not (w.held and w.is_encoded)
                   for w in (state.workers[rank] for rank in group)) > 1:  # fmt: skip
                return
        if all(w.own is None for w in state.workers):
            return
        raise FaultError(f"one worker of a group was lost, but: {obstacle}")

    def train(self, state):
        slowest = min(w.own.newest for w in state.workers)
        yield from self.encode(state)
        for rank, w in enumerate(state.workers):
            own = w.own
            if w.is_changing:
                step = own.newest + 1
                done = w._replace(
                    own=self.rules.append(own, step), is_changing=False,
                    parts=self.completed(rank, w, step),
                )  # fmt: skip
                for told in self.tell(done):
                    yield with_worker(state, rank, told)
            # Collectives of a step come before its change, and need all workers.
            elif (
                self.may_begin(own, slowest)
                and self.rules.may_change(own, w.acknowledged)
                and (torn := self.changed(rank, w, own.next)) is not None
            ):
                yield with_worker(state, rank, torn)
            for holder in self._holders[rank]:
                if (arrived := self.arrive(state, rank, holder)) is not None:
                    yield arrived
            # A holder speaks for all members at once; a worker hears all its holders.
            step = w.acknowledged + 1
            if step <= own.newest and all(
                self.may_acknowledge(state.workers[holder], holder, rank, step)
                for holder in self.others(rank)
            ):
                yield with_worker(state, rank, w._replace(acknowledged=step))

    def encode(self, state):
        """What one holder lacks, at once: ranges between which steps pass are tested apart."""
        for rank, w in enumerate(state.workers):
            members = [state.workers[member] for member in self.others(rank)]
            stand = w.own.newest if w.own is not None else None
            if not w.is_encoded and all(
                not m.is_changing and m.own.newest == log.newest == stand
                for m, log in zip(members, w.held, strict=True)
            ):
                parity = self.gather(state, self.group_of[rank], rank, None)
                yield with_worker(state, rank, w._replace(parity=parity, is_encoded=True))

    def changed(self, rank, w, step):
        """A worker's memory in the middle of a step."""
        return w._replace(is_changing=True, parts=(w.parts[0] ^ TORN, *w.parts[1:]))

    def completed(self, rank, w, step):
        """A worker's parts after a step."""
        return self.values[rank][step]

    def rows_at(self, rank, w, step):
        """A worker's parts at a state, as they must be."""
        return self.values[rank][step]

    def tell(self, w):
        """A worker that has completed a step, with what it tells of it."""
        return (w,)

    def may_begin(self, own, slowest):
        return own.newest < self.steps and own.newest <= slowest

    def may_acknowledge(self, memory, holder, member, step):
        held = dict(zip(self.others(holder), memory.held, strict=True))
        return self.rules.may_acknowledge({member: held[member]}, step)

    def arrive(self, state, member, holder):
        memory = state.workers[holder]
        number = self.others(holder).index(member)
        log = memory.held[number]
        if log.newest >= state.workers[member].own.newest:
            return None
        step, parity = log.newest + 1, memory.parity
        for _ in range(self.rules.times_applied):
            parity ^= self.delta(holder, member, step)
        held = replaced(memory.held, number, self.rules.append(log, step))
        return with_worker(state, holder, memory._replace(parity=parity, held=held))

    def recover(self, state):
        """One step after the other; workers go back in any order, the rest has one order."""
        step, *left = state.steps
        events = []
        if isinstance(step, Return):
            undone = [(rank, self.undo(state, rank)) for rank in range(self.size)]
            events = [with_worker(state, rank, w) for rank, w in undone if w is not None]
        elif isinstance(step, Rebuild):
            lost = [r for r in step.lost if state.workers[r].own is None]
            events = [self.decode(state, self.group_of[r], r) for r in lost[:1]]
        elif isinstance(step, Encode):
            lacking = [r for r in step.lacking if not state.workers[r].held]
            events = [self.begin_parity(state, r) for r in lacking[:1]]
        if events:
            yield from events
        elif left:
            yield from self.recover(state._replace(steps=tuple(left)))
        else:
            yield self.end_recovery(state)

    def undo(self, state, rank):
        worker = self.undo_once(state.workers[rank], rank, state.goal)
        while self.atomic_undo and worker is not None:
            if (more := self.undo_once(worker, rank, state.goal)) is None:
                break
            worker = more
        return worker

    def undo_once(self, w, rank, goal):
        """One worker's next delta taken back; None: it is there."""
        if w.own is None:
            return None
        if w.is_changing and self.rules.undoes_change:
            return w._replace(is_changing=False, parts=self.completed(rank, w, w.own.newest))
        if steps := self.rules.undo_order(w.own, goal):
            was, now = self.values[rank][steps[0]], self.values[rank][steps[0] - 1]
            parts = tuple(p ^ a ^ b for p, a, b in zip(w.parts, was, now, strict=True))
            own = self.rules.undone(w.own, steps[0])
            return w._replace(own=own, is_changing=False, parts=parts)
        for number, (member, log) in enumerate(zip(self.others(rank), w.held, strict=False)):
            steps = self.rules.undo_order(log, goal) if self.rules.undoes_parity else []
            if steps:
                held = replaced(w.held, number, self.rules.undone(log, steps[0]))
                parity = w.parity ^ self.delta(rank, member, steps[0])
                return w._replace(parity=parity, held=held)
        return None

    def begin_parity(self, state, holder):
        parity = 0 if self.behind else self.gather(state, self.group_of[holder], holder, None)
        held = tuple(protocol.begin(state.goal) for _ in self.others(holder))
        begun = {"parity": parity, "held": held, "is_encoded": not self.behind}
        return with_worker(state, holder, state.workers[holder]._replace(**begun))

    def end_recovery(self, state):
        for rank, w in enumerate(state.workers):
            if not w.held:
                raise FaultError(f"worker {rank} trains on without parity")
            if not w.missing and w.parts != self.rows_at(rank, w, state.goal):
                raise FaultError(
                    f"worker {rank} trains on with other rows than those of state {state.goal}"
                )
        workers = tuple(
            w._replace(acknowledged=state.goal, is_changing=False) for w in state.workers
        )
        return State(workers, state.losses, None)

    def decoded(self, state, group, lost):
        parts = list(state.workers[lost].parts)
        for rank, holder in self.rules.to_decode([lost], group):
            parts[part_held(group, holder, rank)] = self.gather(state, group, holder, lost)
        return tuple(parts)

    def decode(self, state, group, lost):
        parts = self.decoded(state, group, lost)
        if parts != self.rows_at(lost, state.workers[lost], state.goal):
            raise FaultError(f"other rows were decoded than those of state {state.goal}")
        own = protocol.begin(state.goal)
        return with_worker(state, lost, state.workers[lost]._replace(own=own, parts=parts))

    def gather(self, state, group, holder, lost):
        """The XOR over the group around one holder's parity."""
        value = 0
        for rank in group:
            given = self.rules.contribution(group, rank, holder, lost)
            if given == PARITY:
                value ^= state.workers[rank].parity
            elif given is not None:
                value ^= state.workers[rank].parts[given]
        return value

    def check(self, state):
        """What holds whenever all train."""
        for rank, w in enumerate(state.workers):
            if state.goal is None and w.held and w.is_encoded:
                states = {m: log.newest for m, log in zip(self.others(rank), w.held, strict=True)}
                if w.parity != self.right_parity(rank, states):
                    raise FaultError(f"the parity on worker {rank} is of no state")


def with_worker(state, rank, worker):
    return state._replace(workers=replaced(state.workers, rank, worker))


def replaced(values, number, value):
    return (*values[:number], value, *values[number + 1 :])


def explore(model, *, deep=False) -> Result:
    """Visit every state; raises FaultError at the first one that must not be.

    Args:
        deep: follow one way to its end first, which finds faults sooner.
    """
    start = model.first()
    seen, waiting = {start}, deque([start])
    recoveries = fallbacks = 0
    while waiting:
        state = waiting.pop() if deep else waiting.popleft()
        model.check(state)
        try:
            reached = list(model.next_states(state))
        except ProtocolError as error:
            raise FaultError(str(error)) from error
        if not reached and any(w.own.newest < model.steps for w in state.workers):
            raise FaultError("nobody can do anything, and steps are left")
        for other in reached:
            if other is None:
                fallbacks += 1
                continue
            recoveries += state.goal is not None and other.goal is None
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return Result(len(seen), recoveries, fallbacks)


def one_group(workers):
    return (tuple(range(workers)),)


def mirrors(workers):
    return tuple((rank, rank + 1) for rank in range(0, workers, 2))
