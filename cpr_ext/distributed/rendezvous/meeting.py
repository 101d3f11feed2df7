"""Who of a job's workers waits for the others, and when all are there. No I/O; times are given.

Each round has an epoch, one more than any member has seen, and a roster: the process that has each
rank. A rank belongs to the process that the newest roster names, as long as that one is connected.
A process whose rank another one has in a newer round is refused, whenever it returns.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

# In which living processes find a host that was started again.
FIND_SECONDS = 3.0
_NOBODY = -1


class MeetingError(Exception):
    """A worker cannot take part; says why."""


class SupersededError(MeetingError):
    """Another process has this worker's rank in a newer round."""


class UnknownRoundError(Exception):
    """A process comes from a round that the host does not know: it must show the roster."""


@dataclass(frozen=True)
class Claim:
    """How a process shows that it may be a worker.

    Attributes:
        rank, world_size: of the worker.
        member: distinguishes processes.
        epoch: of the newest round that this process was in; 0: of none.
        roster: the members of that round, by rank; needed where the host does not know it.
        run: of the job, as this worker's store knows it; empty: it knows none.
        seen: the highest epoch of that run that this worker's store knows.
        who: describes the process to a person.
        machine: its address, as the host sees it.
    """

    rank: int
    world_size: int
    member: str
    epoch: int = 0
    roster: tuple[str, ...] = ()
    run: str = ""
    seen: int = 0
    who: str = ""
    machine: str = ""


@dataclass(frozen=True)
class Waiter:
    """A process that waits.

    Attributes:
        token: distinguishes the times that processes wait.
        visit: the connection through which it was last heard of.
        since, seen: when it came, and was last heard of.
        lease_seconds: silent for so long, it waits no more.
    """

    claim: Claim
    token: str
    visit: int
    since: float
    seen: float
    lease_seconds: float


class Meeting:
    """The workers of one job that wait for the next round.

    A round is complete once every rank waits at the same time. A worker that closes its connection
    or is silent for longer than its lease waits no more.

    Args:
        knows_all_from: by this time each living process of a round has connected to this host, if
            there was a host before it.

    Attributes:
        round_id: of the newest complete round; empty before the first.
        epoch: of the newest round that was completed here, or that a process showed.
        roster: its members, by rank.
        machines: the address of each of these, by rank.
        left: by rank, who had a place in the round before, and has it no more; empty: not known.
    """

    def __init__(self, knows_all_from: float = float("-inf")) -> None:
        self._knows_all_from = knows_all_from
        self.round_id = ""
        self.epoch = 0
        self.roster: tuple[str, ...] = ()
        self.machines: tuple[str, ...] = ()
        self.left: dict[int, str] = {}
        self._members: frozenset[str] = frozenset()  # tokens of the newest complete round
        self._waiters: dict[str, Waiter] = {}  # by member: a process waits once at a time
        self._visits: dict[int, str] = {}  # members by connection
        self._visits_of: dict[str, tuple[int, ...]] = {}  # the same by member
        self._known: dict[str, str] = {}  # members that were connected once, and who they are
        # By run, the epoch that a store knows, until this host has seen a round itself.
        self._floors: dict[str, int] = {}
        # Members of the roster whose place was given away, and the connection of who has it.
        self._given_away: dict[str, int] = {}

    def arrive(self, claim: Claim, *, visit: int, now: float) -> None:
        """Note that this process is connected.

        Raises:
            SupersededError: another process has its rank.
            UnknownRoundError: its roster is needed.
        """
        is_new = claim.epoch > self.epoch
        if is_new:
            if not claim.roster:
                raise UnknownRoundError
            self.epoch, self.roster = claim.epoch, claim.roster
        if not self.round_id:
            floor = self._floors.setdefault(claim.run, 0)
            self._floors[claim.run] = max(floor, claim.seen)
            if is_new or claim.seen > floor:
                self._forget(lambda waiter: self._is_superseded(waiter.claim))
        if self._is_superseded(claim):
            who = self._known.get(self.roster[claim.rank], "") if self.roster else ""
            raise SupersededError(
                f"worker {claim.rank} was replaced while the others could not reach it: it was in "
                f"round {claim.epoch}, and in a later one another process has its rank"
                f"{f' ({who})' if who else ''}. This process ends; the job continues without it"
            )
        if self._visits.get(visit) != claim.member:
            self._disconnect(visit)
            self._visits[visit] = claim.member
            self._visits_of[claim.member] = (*self._visits_of.get(claim.member, ()), visit)
        self._known[claim.member] = claim.who

    def meet(
        self, claim: Claim, token: str, *, lease_seconds: float, visit: int, now: float
    ) -> None:
        """Note that this worker waits; completes the round if all do.

        Args:
            token: distinguishes the times that processes wait.
            lease_seconds: silent for so long, it waits no more.
            visit: number of its connection.

        Raises:
            MeetingError: it cannot take part: it was replaced, another living process wants this
                rank, or other workers say another size.
            UnknownRoundError: its roster is needed.
        """
        if token in self._members:
            return
        self.arrive(claim, visit=visit, now=now)
        self._forget_silent(now)
        rank, world_size = claim.rank, claim.world_size
        others_size = self._world_size() or world_size
        if others_size != world_size:
            raise MeetingError(
                f"worker {rank} says that there are {world_size} workers, others say "
                f"{others_size}; give all the same CPR_WORLD_SIZE"
            )
        if not 0 <= rank < world_size:
            raise MeetingError(f"worker {rank} of {world_size} cannot be")
        before = self._waiters.pop(claim.member, None)
        since = before.since if before is not None and before.token == token else now
        waiter = Waiter(claim, token, visit, since, now, lease_seconds)
        if not self._is_holder(claim):
            self._refuse_rival(waiter)
        self._waiters[claim.member] = waiter
        self._complete(world_size, now)

    def is_member(self, token: str) -> bool:
        """Return whether the newest complete round has this worker."""
        return token in self._members

    def has_left(self, claim: Claim, token: str) -> bool:
        """Return whether a process that waits is one of the newest round, which is over then."""
        is_of_it = claim.epoch == self.epoch and self._is_holder(claim)
        return is_of_it and not self.is_member(token)

    def held_by(self, claim: Claim) -> str:
        """Return who has this rank and is connected; empty: nobody else, as far as is known."""
        holder = self.roster[claim.rank] if claim.rank < len(self.roster) else ""
        if self._is_holder(claim) or not self._holds(holder):
            return ""
        return self._known.get(holder) or "a process of the newest round"

    def replaces_unheard(self, claim: Claim, now: float) -> bool:
        """Return whether a process has the place of one that never connected to this host.

        A host before this one may have had it, and has noticed its end or not.
        """
        holder = self.roster[claim.rank] if claim.rank < len(self.roster) else ""
        is_unheard = bool(holder) and holder not in self._known
        return is_unheard and not self._is_holder(claim) and self._is_gone(holder, now)

    def say_bye(self, member: str) -> str:
        """Note that a process is about to leave of its own will; returns who it is."""
        for visit in self._visits_of.get(member, ()):
            self._disconnect(visit)
        return self._known.get(member, "")

    def lost_of(self, visit: int) -> int:
        """Return the epoch of the newest round if this connection is of a member of it, else 0."""
        return self.epoch if self._visits.get(visit, "") in self.roster else 0

    def who(self, visit: int) -> str:
        """Return who has this connection; empty: no member, or none of a round."""
        return self._known.get(self._visits.get(visit, ""), "")

    def is_last(self, visit: int) -> bool:
        """Return whether its process has no other connection than this one."""
        return self._visits_of.get(self._visits.get(visit, "")) == (visit,)

    def take_over(self, rank: int, member: str, *, visit: int, now: float) -> bool:
        """Give the place of ``member`` to the process of this connection, if that one is gone.

        Returns:
            Whether ``member`` is of the newest round, and not connected. It is refused from then
            on, whenever it returns.
        """
        is_of_roster = rank < len(self.roster) and self.roster[rank] == member
        taken_by = self._given_away.get(member, visit)
        is_gone = self._is_gone(member, now)
        if not is_of_roster or not is_gone or taken_by not in (visit, _NOBODY):
            return False
        self._given_away[member] = visit
        self._waiters.pop(member, None)
        return True

    def leave(self, visit: int, now: float) -> None:
        """Note that a connection was closed; completes the round if all others wait for that."""
        for member in [m for m, taker in self._given_away.items() if taker == visit]:
            self._given_away[member] = _NOBODY
        self._disconnect(visit)
        self._forget(lambda waiter: waiter.visit == visit)
        if self._waiters:
            self._complete(self._world_size(), now)

    def missing(self, world_size: int, now: float) -> list[int]:
        """Return ranks of which no process waits that may have them."""
        self._forget_silent(now)
        seated = self._seated(now)
        return [rank for rank in range(world_size) if rank not in seated]

    def _world_size(self) -> int:
        """Return what those that wait say, which is the same; 0: nobody waits."""
        return next((waiter.claim.world_size for waiter in self._waiters.values()), 0)

    def _disconnect(self, visit: int) -> None:
        if (member := self._visits.pop(visit, None)) is None:
            return
        left = tuple(other for other in self._visits_of.pop(member) if other != visit)
        if left:
            self._visits_of[member] = left

    def _forget(self, is_forgotten: Callable[[Waiter], bool]) -> None:
        for member in [member for member, w in self._waiters.items() if is_forgotten(w)]:
            del self._waiters[member]

    def _forget_silent(self, now: float) -> None:
        self._forget(lambda waiter: waiter.seen + waiter.lease_seconds < now)

    def _seated(self, now: float) -> dict[int, Waiter]:
        """Return by rank the process that gets it."""
        seated: dict[int, Waiter] = {}
        for waiter in sorted(self._waiters.values(), key=lambda waiter: waiter.since):
            rank = waiter.claim.rank
            if self._is_holder(waiter.claim):
                seated[rank] = waiter
            elif self._is_free_for(waiter.claim, now):
                seated.setdefault(rank, waiter)
        return seated

    def _complete(self, world_size: int, now: float) -> None:
        if len(self._waiters) < world_size:
            return
        seated = self._seated(now)
        if len(seated) < world_size:
            return
        claims = [seated[rank].claim for rank in range(world_size)]
        self.epoch = max(self.epoch, *(claim.seen for claim in claims)) + 1
        before, self.roster = self.roster, tuple(claim.member for claim in claims)
        pairs = enumerate(zip(before, self.roster, strict=False))
        self.left = {rank: self._known.get(old, "") for rank, (old, new) in pairs if old != new}
        self.machines = tuple(claim.machine for claim in claims)
        self._given_away.clear()
        self.round_id = secrets.token_hex(8)
        self._members = frozenset(waiter.token for waiter in seated.values())
        self._floors.clear()
        self._forget(lambda waiter: waiter.token in self._members)
        connected = self._visits_of.keys() | set(self.roster)
        self._known = {member: self._known.get(member, "") for member in connected}

    def _holds(self, member: str) -> bool:
        """Return whether a member of the roster is connected, and has its place."""
        return member in self._visits_of and member not in self._given_away

    def _is_holder(self, claim: Claim) -> bool:
        return claim.rank < len(self.roster) and self.roster[claim.rank] == claim.member

    def _is_superseded(self, claim: Claim) -> bool:
        if claim.epoch == 0:
            return False
        if claim.member in self._given_away:
            return True
        is_older = max(self.epoch, claim.epoch) < self._floors.get(claim.run, 0)
        return is_older or (bool(self.roster) and not self._is_holder(claim))

    def _is_free_for(self, claim: Claim, now: float) -> bool:
        if self._is_holder(claim):
            return True
        holder = self.roster[claim.rank] if claim.rank < len(self.roster) else ""
        return self._is_gone(holder, now)

    def _is_gone(self, holder: str, now: float) -> bool:
        if self._holds(holder):
            return False
        return holder in self._known or holder in self._given_away or now >= self._knows_all_from

    def _refuse_rival(self, waiter: Waiter) -> None:
        """Refuse the later one of two new processes of one rank."""
        rank = waiter.claim.rank
        for other in self._waiters.values():
            # A predecessor that died without closing its connection is not heard of again.
            if other.claim.rank == rank and other.since < waiter.since < other.seen:
                raise MeetingError(
                    f"two processes are worker {rank}; give each worker a rank of its own"
                )
