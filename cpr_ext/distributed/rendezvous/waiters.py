"""Processes that wait for the next round, found by token, process, rank or connection.

Each look takes the same time for any number of them: a round of N workers has N such looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


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


@dataclass
class Waiter:
    """A process that waits.

    Attributes:
        visit: the connection through which it was last heard of.
        since, seen: when it came, and was last heard of.
        lease_seconds: silent for so long, it waits no more.
    """

    claim: Claim
    visit: int
    since: float
    seen: float
    lease_seconds: float

    @property
    def ends(self) -> float:
        """When its lease ends, unless it is heard of."""
        return self.seen + self.lease_seconds


class Waiters(Mapping[str, Waiter]):
    """By token. A process waits once at a time."""

    # Values are never changed in place, so that a copy of the dictionaries is a copy of all.
    def __init__(self) -> None:
        self._of_token: dict[str, Waiter] = {}
        self._of_member: dict[str, str] = {}
        self._of_rank: dict[int, tuple[str, ...]] = {}
        self._of_visit: dict[int, tuple[str, ...]] = {}
        self._no_end_before = float("inf")  # of any lease

    def __getitem__(self, token: str) -> Waiter:
        return self._of_token[token]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of_token)

    def __len__(self) -> int:
        return len(self._of_token)

    @property
    def num_ranks(self) -> int:
        """Of how many ranks a process waits."""
        return len(self._of_rank)

    def of_rank(self, rank: int) -> list[Waiter]:
        """Return those that want this rank."""
        return [self._of_token[token] for token in self._of_rank.get(rank, ())]

    def of_visit(self, visit: int) -> tuple[str, ...]:
        """Return the tokens that came through a connection."""
        return self._of_visit.get(visit, ())

    def of_member(self, member: str) -> tuple[str, ...]:
        """Return the token of a process, if it waits."""
        return (self._of_member[member],) if member in self._of_member else ()

    def add(self, token: str, waiter: Waiter) -> None:
        """Add a process that does not wait."""
        claim = waiter.claim
        self._of_token[token] = waiter
        self._of_member[claim.member] = token
        self._of_rank[claim.rank] = (*self._of_rank.get(claim.rank, ()), token)
        self._of_visit[waiter.visit] = (*self._of_visit.get(waiter.visit, ()), token)
        self._no_end_before = min(self._no_end_before, waiter.ends)

    def forget(self, tokens: Iterable[str]) -> None:
        """Forget those that wait among these."""
        for token in tuple(tokens):
            if (waiter := self._of_token.pop(token, None)) is None:
                continue
            self._of_member.pop(waiter.claim.member, None)
            for index, key in (
                (self._of_rank, waiter.claim.rank),
                (self._of_visit, waiter.visit),
            ):
                index[key] = tuple(other for other in index[key] if other != token)
                if not index[key]:
                    del index[key]

    def drop_silent(self, now: float) -> None:
        """Forget those whose lease has ended."""
        if now <= self._no_end_before:
            return
        self.forget(token for token, waiter in self._of_token.items() if waiter.ends < now)
        ends = (waiter.ends for waiter in self._of_token.values())
        self._no_end_before = min(ends, default=float("inf"))
