"""What the rendezvous' host knows of one job: who is there, who waits, who has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.meeting import Meeting
from cpr_ext.distributed.rendezvous.nodes import Nodes

_UNKNOWN = "_OTHER: its process is gone without a word"
_MISSING_SECONDS = 0.25  # between two looks for who is missing


MOST_NAMED = 8
_MOST_CHARACTERS = 200  # of why a process has ended
Keys = tuple[str, ...]


class _Gathering:
    """Those who wait for the same values."""

    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = set(missing)
        self.is_over = asyncio.Event()
        self.packed = ""


class Values:
    """The notes of one job, and what members of its newest round give each other."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._gatherings: dict[Keys, _Gathering] = {}
        self._of_key: dict[str, list[_Gathering]] = {}

    def write(self, key: str, text: str) -> None:
        """Set a text in place of any that is there."""
        self._texts[key] = text
        for gathering in self._of_key.get(key, ()):
            gathering.packed = ""
            gathering.missing.discard(key)
            if not gathering.missing:
                gathering.is_over.set()

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all these texts are there."""
        return all(key in self._texts for key in keys)

    async def gather(self, keys: Keys, seconds: float) -> dict[str, Any]:
        """Return the texts of all these keys, packed, once they are there.

        If that takes longer than ``seconds``: how many are missing, and some of them.
        """
        gathering = self._gatherings.get(keys)
        if gathering is None:
            gathering = self._begin(keys)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gathering.is_over.wait(), seconds)
        if gathering.missing:
            missing = [key for key in keys if key in gathering.missing]
            return {"values": None, "missing": missing[:MOST_NAMED], "num_missing": len(missing)}
        if not gathering.packed:
            gathering.packed = wire.pack([self._texts[key] for key in keys])
        return {"values": gathering.packed}

    def forget(self, is_forgotten: Callable[[str], bool]) -> None:
        """Forget texts by their key; who waits for one of them waits no more."""
        for key in [key for key in self._texts if is_forgotten(key)]:
            del self._texts[key]
        for keys in [keys for keys in self._gatherings if any(map(is_forgotten, keys))]:
            self._end(keys)

    def _begin(self, keys: Keys) -> _Gathering:
        gathering = _Gathering(key for key in keys if key not in self._texts)
        if not gathering.missing:
            gathering.is_over.set()
        self._gatherings[keys] = gathering
        for key in keys:
            self._of_key.setdefault(key, []).append(gathering)
        return gathering

    def _end(self, keys: Sequence[str]) -> None:
        gathering = self._gatherings.pop(tuple(keys))
        gathering.missing.update(keys)
        gathering.is_over.set()
        for key in keys:
            self._of_key[key].remove(gathering)
            if not self._of_key[key]:
                del self._of_key[key]


class ServedJob:
    """What the host knows of one job.

    Args:
        knows_all_from: by this time each living process has connected to this host.
    """

    def __init__(self, knows_all_from: float) -> None:
        self.meeting = Meeting(knows_all_from)
        self.nodes = Nodes(knows_all_from)
        self.values = Values()
        self.world_size = 0  # as workers say
        self.changed = asyncio.Condition()
        # By visit, how to say something to a process that asks nothing; and those that left.
        self.listeners: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._ended = 0  # the epoch of which all have heard that a member has ended
        self._members = ("", "")  # of the round of this name, packed
        self._missing: tuple[int, list[int]] = (0, [])
        self._missing_from = float("-inf")
        # Ranks of the round of this epoch that have waited long for others.
        self._waiting: tuple[int, set[int]] = (0, set())
        self._failures: dict[int, tuple[str, int]] = {}  # by rank: the newest, how often in a row
        # Of processes that ended since the newest round, why: a kind, and after a colon more of it.
        self._ends: dict[str, str] = {}

    def tell_of_end(self, visit: int, *, is_silent: bool = False) -> None:
        """Say to the others that the process of this connection has ended, if it is of a round.

        Args:
            is_silent: its kernel has not closed its connections, so that no peer notices.
        """
        if is_silent:
            self.note_end(self.meeting.who(visit), "timeout: nothing is heard of its machine")
        has_arrived = self.listeners.pop(visit, None) is not None
        if has_arrived or self.meeting.is_last(visit):
            self.tell_of_loss(self.meeting.lost_of(visit), is_silent=is_silent)

    def tell_of_loss(self, epoch: int, *, is_silent: bool) -> None:
        """Say to all that a member of the round of this epoch has ended, once; 0: of none."""
        if epoch in (0, self._ended):
            return
        self._ended = epoch
        self.values.forget(lambda key: key.startswith(f"round/{self.meeting.round_id}/"))
        for say in list(self.listeners.values()):
            say({"lost_of": epoch, "is_silent": is_silent})

    def listen(self, visit: int, say: Callable[[dict[str, Any]], None]) -> None:
        """Have a process hear of ends, also of one in its round before it was connected."""
        self.listeners[visit] = say
        if self.has_lost_member and self.meeting.lost_of(visit):
            say({"lost_of": self._ended, "is_silent": False})

    @property
    def has_lost_member(self) -> bool:
        """Whether a member of the newest round has ended."""
        return 0 < self._ended == self.meeting.epoch

    def note_waiting(self, rank: int, epoch: int, *, is_waiting: bool) -> dict[str, Any]:
        """Note whether a worker has waited long for others of its round.

        If all have, none of them will come: connections are broken, and the round is over.

        Returns:
            Some of those that do not wait, and whether this worker is the first of those that do.
        """
        if self._waiting[0] != epoch:
            self._waiting = (epoch, set())
        waiting = self._waiting[1]
        (waiting.add if is_waiting else waiting.discard)(rank)
        others = [other for other in range(len(self.meeting.roster)) if other not in waiting]
        if not others:
            self.tell_of_loss(epoch, is_silent=True)
        return {"others": others[:MOST_NAMED], "is_first": rank == min(waiting, default=None)}

    def end(self, reason: str) -> None:
        """Note that the job is done, or, and say it to all agents, why it cannot continue."""
        for visit in self.nodes.end():
            if reason and (say := self.listeners.get(visit)) is not None:
                say({"over": reason})

    def note_end(self, who: str, reason: str) -> None:
        """Note why a process ends, or has ended: the first who says it knows it best."""
        lines = reason.splitlines() or [""]
        self._ends.setdefault(who, lines[0][:_MOST_CHARACTERS])

    def count_failure(self, rank: int, reason: str) -> int:
        """Return how many processes of a rank, one after the other, ended by this error."""
        times = self._failures.get(rank, ("", 0))
        self._failures[rank] = (reason, times[1] + 1 if times[0] == reason else 1)
        return self._failures[rank][1]

    async def hand_on(self, token: str) -> bool:
        """Give the node of an agent whose workers died to another on its machine."""
        given = self.nodes.hand_on(token)
        await self._tell(given)
        return bool(given)

    async def assign(self) -> None:
        """Give free nodes to agents that stand by, and say so to them and to their workers."""
        await self._tell(self.nodes.assign(time.monotonic()))

    async def _tell(self, given: Mapping[int, int]) -> None:
        for visit, node in given.items():
            if (say := self.listeners.get(visit)) is not None:
                say({"node": node})
        if given:
            await self.wake()

    async def wake(self) -> None:
        """Have all that wait look again."""
        async with self.changed:
            self.changed.notify_all()

    def members(self) -> str:
        """Return who is in the newest round and where, and why who left; packed once for all."""
        meeting = self.meeting
        if self._members[0] != meeting.round_id:
            ends = [(rank, self._ends.get(who, _UNKNOWN)) for rank, who in meeting.left.items()]
            packed = wire.pack([meeting.roster, meeting.machines, ends])
            self._members = (meeting.round_id, packed)
            self._ends.clear()
        return self._members[1]

    def missing(self, now: float) -> tuple[int, list[int]]:
        """Return how many ranks are missing, and some of them; a moment old at most."""
        if now > self._missing_from + _MISSING_SECONDS:
            found = self.meeting.missing(self.world_size, now)
            self._missing, self._missing_from = (len(found), found[:MOST_NAMED]), now
        return self._missing

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Notify the waiters if a round is completed inside the block."""
        before = self.meeting.round_id
        yield
        if self.meeting.round_id != before:
            self.members()
            kept = f"round/{self.meeting.round_id}/"
            self.values.forget(lambda key: key.startswith("round/") and not key.startswith(kept))
            await self.wake()
