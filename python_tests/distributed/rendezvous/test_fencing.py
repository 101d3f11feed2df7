"""Every interleaving of deaths, cuts, returns and meetings: who gets a rank, and who is refused.

Breadth first, until nothing new is reached, or the third round. The functions are those that the
host calls.
"""

import copy
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from cpr_ext.distributed.rendezvous import meeting as rules
from cpr_ext.distributed.rendezvous.meeting import FIND_SECONDS, Claim, Meeting

FOREVER = 1e9
ROUNDS = 3


class FaultError(Exception):
    """The host did what it must never do."""


@dataclass(frozen=True)
class Process:
    name: str
    rank: int
    epoch: int = 0
    roster: tuple = ()
    seen: int = 0
    is_alive: bool = True
    is_cut: bool = False
    is_out_of_touch: bool = False  # since it was cut off, until it connects again
    is_there: bool = False  # the host knows of its connection
    waits: bool = False

    @property
    def claim(self):
        return Claim(self.rank, 2, self.name, self.epoch, (), "run", self.seen)


@dataclass
class World:
    """Two ranks, and processes that come for them."""

    host: Meeting = field(default_factory=Meeting)
    processes: tuple = (Process("a", 0), Process("b", 1))
    now: float = 0.0
    epoch: int = 0  # of the newest round that there was
    roster: tuple = ()
    stores: tuple = (0, 0)  # the epoch that each rank's store knows
    left: dict = field(default_factory=dict)  # how often what may happen

    def key(self):
        host = self.host
        waiting = sorted((w.claim.member, w.claim.epoch) for w in host._waiters.values())
        known = (host.epoch, host.roster, bool(host.round_id), tuple(sorted(host._known)))
        found = self.now >= host._knows_all_from
        visits = tuple(sorted(host._visits.values()))
        limits = tuple(sorted(host._floors.items())), tuple(self.left.values())
        here = (self.processes, self.epoch, self.roster, self.stores)
        known = (*known, tuple(sorted(host._given_away.items())))
        return (*here, tuple(waiting), known, found, visits, limits)

    def copy(self):
        other = copy.copy(self)
        other.host = copy.copy(self.host)
        for name in ("_visits", "_visits_of", "_known", "_floors", "_given_away", "_waiters"):
            setattr(other.host, name, dict(getattr(self.host, name)))
        return other

    def spend(self, what):
        self.left = {**self.left, what: self.left[what] - 1}

    def change(self, at, **values):
        changed = replace(self.processes[at], **values)
        self.processes = (*self.processes[:at], changed, *self.processes[at + 1 :])

    def arrive(self, at, *, waits):
        """A process connects, and waits for the others or trains."""
        process = self.processes[at]
        for claim in (process.claim, replace(process.claim, roster=process.roster)):
            try:
                if waits:
                    token = f"{process.name}{process.epoch}"
                    self.host.meet(claim, token, lease_seconds=FOREVER, visit=at, now=self.now)
                else:
                    self.host.arrive(claim, visit=at, now=self.now)
            except rules.UnknownRoundError:
                continue
            except rules.SupersededError:
                is_holder = self.roster and self.roster[process.rank] == process.name
                if is_holder and process.name not in self.host._given_away:
                    raise FaultError(f"the holder {process.name} was refused") from None
                self.change(at, is_alive=False, is_there=False, waits=False)
                return
            break
        self.change(at, is_there=True, waits=waits, is_out_of_touch=False)
        self.look()

    def look(self):
        """Was a round completed?"""
        if not self.host.round_id or self.host.roster == self.roster == ():
            return
        waiting = {waiter.token for waiter in self.host._waiters.values()}
        if self.host.epoch == self.epoch or self.host._members & waiting:
            return
        if self.host.epoch < self.epoch:
            raise FaultError(f"round {self.host.epoch} after round {self.epoch}")
        for rank, name in enumerate(self.host.roster):
            process = next(p for p in self.processes if p.name == name)
            holder = self.roster[rank] if self.roster else ""
            before = next((p for p in self.processes if p.name == holder), None)
            if process.epoch and holder != name:
                raise FaultError(f"{name} was replaced in round {self.epoch}, and is back")
            lives = before and before.is_alive and not before.is_out_of_touch
            if lives and before.name != name:
                raise FaultError(f"{name} took the rank of {before.name}, which lives")
        self.epoch, self.roster = self.host.epoch, self.host.roster
        self.stores = (self.epoch, self.epoch)
        for at, process in enumerate(self.processes):
            if process.name in self.roster and process.is_there:
                values = {"epoch": self.epoch, "roster": self.roster, "seen": self.epoch}
                self.change(at, waits=False, **values)

    def leave(self, at, **values):
        self.change(at, is_there=False, waits=False, **values)
        self.host.leave(at, self.now)
        self.look()

    def next_worlds(self):
        for at, process in enumerate(self.processes):
            if not process.is_alive:
                continue
            if not process.is_cut and not process.waits:
                yield lambda w, at=at: w.arrive(at, waits=True)
            if not process.is_cut and not process.is_there:
                yield lambda w, at=at: w.arrive(at, waits=False)
            if self.left["deaths"]:
                yield lambda w, at=at: w.die(at)
            if self.left["cuts"] and not process.is_cut:
                yield lambda w, at=at: w.cut(at)
            if self.left["overrules"] and not process.is_cut and not process.epoch:
                yield lambda w, at=at: w.overrule(at)
            if process.is_cut:
                yield lambda w, at=at: w.change(at, is_cut=False)
        if self.left["more"]:
            for rank in (0, 1):
                yield lambda w, rank=rank: w.come(rank)
        if self.left["restarts"]:
            yield World.restart
        if self.now < self.host._knows_all_from:
            yield World.wait

    def die(self, at):
        self.spend("deaths")
        self.leave(at, is_alive=False)

    def cut(self, at):
        self.spend("cuts")
        self.leave(at, is_cut=True, is_out_of_touch=True)

    def overrule(self, at):
        """It finds the lock of its rank held."""
        self.spend("overrules")
        process = self.processes[at]
        if not self.roster or not self.host.take_over(
            process.rank, self.roster[process.rank], visit=at, now=self.now
        ):
            return
        holder = next(p for p in self.processes if p.name == self.roster[process.rank])
        if holder.is_alive and not holder.is_out_of_touch:
            raise FaultError(f"the place of {holder.name} was given away, which lives")

    def come(self, rank):
        self.spend("more")
        name = f"new{len(self.processes)}"
        self.processes = (*self.processes, Process(name, rank, seen=self.stores[rank]))

    def restart(self):
        self.spend("restarts")
        self.host = Meeting(self.now + FIND_SECONDS)
        self.processes = tuple(replace(p, is_there=False, waits=False) for p in self.processes)

    def wait(self):
        """Living processes find the host by then."""
        for at, process in enumerate(self.processes):
            if process.is_alive and not process.is_cut and not process.is_there:
                self.arrive(at, waits=False)
        self.now += FIND_SECONDS


KINDS = ("deaths", "cuts", "more", "restarts", "overrules")


def explore(*limits):
    limits = (*limits, *[0] * (len(KINDS) - len(limits)))
    first = World(left=dict(zip(KINDS, limits, strict=True)))
    seen, queue, rounds = {first.key()}, deque([first]), 0
    while queue:
        world = queue.popleft()
        rounds = max(rounds, world.epoch)
        if world.epoch == ROUNDS:
            continue
        for act in world.next_worlds():
            after = world.copy()
            act(after)
            if (key := after.key()) not in seen:
                seen.add(key)
                queue.append(after)
    return len(seen), rounds


@pytest.mark.parametrize(
    ("limits", "states"),
    [
        ((1, 0, 1, 1), 3125),
        ((0, 1, 1, 1), 6491),
        ((1, 1, 1, 0), 3747),
        ((0, 1, 1, 0, 1), 2620),
        *(
            pytest.param(*case, marks=[pytest.mark.long, pytest.mark.timeout(3600)])
            for case in (
                ((0, 1, 2, 0, 2), 69_525), ((0, 1, 2, 0), 19_111), ((0, 0, 2, 1), 13_215),
                ((1, 1, 1, 1), 21_835), ((1, 1, 2, 0), 72_339),
            )
        ),
    ],
)  # fmt: skip
def test_no_interleaving_gives_a_rank_away_or_refuses_its_holder(limits, states):
    """So many deaths, cuts, processes more, new hosts, and locks found held."""
    found, rounds = explore(*limits)
    print(f"{limits}: {found} states, up to round {rounds}")
    assert found == states
    assert rounds > 1


def not_connected(self, claim, now):
    """Silence is death."""
    is_new = claim.rank >= len(self.roster)
    return is_new or self._is_holder(claim) or self.roster[claim.rank] not in self._visits.values()


MISTAKES = {
    "no epoch": ("_is_superseded", lambda self, claim: False),
    "a rank is free while its holder lives": ("_is_free_for", lambda self, claim, now: True),
    "a restarted host takes silence for death": ("_is_free_for", not_connected),
    "a holder is as good as any other": ("_is_holder", lambda self, claim: False),
    "the place of any holder is given away": ("take_over", lambda self, *who, visit, now: True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(monkeypatch, mistake):
    monkeypatch.setattr(Meeting, *MISTAKES[mistake])
    cases = ((1, 0, 1, 1), (1, 1, 1), (0, 1, 1, 1), (0, 1, 1, 0, 1))
    with pytest.raises(FaultError):
        [explore(*limits) for limits in cases]
