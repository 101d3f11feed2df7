"""Who of a job's workers waits for the others, and when all are there. No I/O; times are given."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


class MeetingError(Exception):
    """A worker cannot take part; says why."""


@dataclass
class _Seat:
    token: str
    visit: int  # the connection through which it was last heard of
    seen: float
    lease_seconds: float

    def is_taken(self, now: float) -> bool:
        return now <= self.seen + self.lease_seconds


class Meeting:
    """The workers of one job that wait for the next round.

    A round is complete once every rank waits at the same time. A worker that closes its connection
    or is silent for longer than its lease waits no more.

    Attributes:
        round_id: of the newest complete round; empty before the first.
    """

    def __init__(self) -> None:
        self.round_id = ""
        self._members: frozenset[str] = frozenset()
        self._world_size = 0
        self._seats: dict[int, _Seat] = {}
        self._rivals: dict[str, float] = {}  # by token, since when it wants a taken seat

    def meet(
        self,
        rank: int,
        world_size: int,
        token: str,
        *,
        lease_seconds: float,
        visit: int,
        now: float,
    ) -> None:
        """Note that this worker waits; completes the round if all do.

        Args:
            token: distinguishes processes, and the times that one process waits.
            lease_seconds: silent for so long, it waits no more.
            visit: number of its connection.

        Raises:
            MeetingError: another living process has this rank, or other workers say another size.
        """
        if token in self._members:
            return
        self._drop_absent(now)
        if self._seats and world_size != self._world_size:
            raise MeetingError(
                f"worker {rank} says that there are {world_size} workers, others say "
                f"{self._world_size}; give all the same CPR_WORLD_SIZE"
            )
        if not 0 <= rank < world_size:
            raise MeetingError(f"worker {rank} of {world_size} cannot be")
        self._world_size = world_size
        seat = self._seats.get(rank)
        if seat is not None and seat.token != token:
            # A predecessor that died without closing its connection is not heard of again.
            if seat.seen > self._rivals.setdefault(token, now):
                raise MeetingError(
                    f"two processes are worker {rank}; give each worker a rank of its own"
                )
            return
        self._rivals.pop(token, None)
        self._seats[rank] = _Seat(token, visit, now, lease_seconds)
        if len(self._seats) == world_size:
            self._members = frozenset(seat.token for seat in self._seats.values())
            self.round_id = secrets.token_hex(8)
            self._seats.clear()
            self._rivals.clear()

    def is_member(self, token: str) -> bool:
        """Return whether the newest complete round has this worker."""
        return token in self._members

    def leave(self, visit: int) -> None:
        """Note that a connection was closed."""
        self._seats = {rank: seat for rank, seat in self._seats.items() if seat.visit != visit}

    def missing(self, world_size: int, now: float) -> list[int]:
        """Return ranks that do not wait."""
        self._drop_absent(now)
        return [rank for rank in range(world_size) if rank not in self._seats]

    def _drop_absent(self, now: float) -> None:
        self._seats = {rank: seat for rank, seat in self._seats.items() if seat.is_taken(now)}
