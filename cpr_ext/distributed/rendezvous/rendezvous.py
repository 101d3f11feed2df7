"""Where workers meet: each waits at the host of the rendezvous until all wait there.

Each round is a meeting of its own, after every loss of a worker. The host says when all are there;
a worker's rank is its identity. What is said crosses as data and is authenticated with the job's
secret (:mod:`cpr_ext.distributed.rendezvous.wire`); training itself does not need the host.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store

from cpr_ext.distributed.identity.run_note import RunNote
from cpr_ext.distributed.identity.worker_identity import Identity, TimeOuts
from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.host_connection import (
    UNTRUSTED_SECONDS,
    HostConnection,
    HostError,
    RefusedError,
    UntrustedHostError,
    own_name,
    place_of,
)
from cpr_ext.distributed.rendezvous.presence import Presence
from cpr_ext.distributed.rendezvous.round_store import RoundStore, named
from cpr_ext.errors import RendezvousError
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("jobs")

_MISSED_HEARTBEATS = 5
_HEARTBEATS_PER_SECOND = 100  # of all workers that wait; with more of them each one is rarer
_REPORT_SECONDS = 10.0  # between two lines about a long wait
_RETRY_SECONDS = 0.2
_NO_ANSWER = ", which does not answer"
_BYE_SECONDS = 1.0


class LeavingError(Exception):
    """This worker is to leave; it is no loss of a peer."""


class Rendezvous:
    """One worker's seat at the rendezvous, kept over rounds.

    Attributes:
        member: distinguishes this process from others of its rank.
        run: what the worker's store knows of its run; None: it has no store.
        note_lost: called from a thread with the epoch of a round, of which a member has ended, and
            whether peers cannot have noticed.
        lost_epoch: of the newest round of which a member is known to have ended.
        is_leaving: asked while this worker waits; if True, :meth:`join` raises LeavingError.
        machines: of the workers of the newest round, by rank, as addresses.
        ended: by rank, why processes ended that were in the round before, and not in the newest.
            First a word, such as a signal or the class of an error, and after a colon more of it.

    Raises:
        UsageError: the job has no secret.
    """

    def __init__(self, identity: Identity, time_outs: TimeOuts) -> None:
        self._identity = identity
        self.run: RunNote | None = None
        self.machines: tuple[str, ...] = ()
        self.ended: dict[int, str] = {}
        self.is_leaving: Callable[[], bool] = lambda: False
        self._time_outs = time_outs
        self._host = HostConnection(identity)
        self.member = secrets.token_hex(8)
        # Of the newest round that this process was in.
        self._epoch, self._roster = 0, tuple[str, ...]()
        self.note_lost: Callable[[int, bool], None] = lambda epoch, is_silent: None
        self.lost_epoch = 0
        self._present = HostConnection(identity)
        self._presence = Presence(self._present, self._arrive, self._hear)
        # Kept here, for torch holds only the part of it that is in C++.
        self._store: RoundStore | None = None

    @property
    def epoch(self) -> int:
        """Of the newest round that this worker was in."""
        return self._epoch

    def join(self) -> Store:
        """Meet all other workers in a new round.

        Returns:
            The round's own store.

        Raises:
            RendezvousError: they were not all there within ``join_seconds``, names those missing;
                or another process has this worker's rank; or the host has another secret.
        """
        self._presence.begin()
        try:
            round_id = self._wait_for_all(time.monotonic() + self._time_outs.join_seconds)
        except RefusedError as error:
            raise RendezvousError(str(error)) from None
        except BaseException:
            self._host.close()  # this worker waits no more
            raise
        self._store = RoundStore(self._host, round_id)
        return self._store

    def _arrive(self) -> None:
        def ask(*, shows_roster: bool) -> dict[str, Any]:
            claim = self._claim(shows_roster)
            return self._present.ask("arrive", claim=claim)

        if ask(shows_roster=False).get("asks_roster"):
            ask(shows_roster=True)

    def _hear(self, news: dict[str, Any]) -> None:
        self.lost_epoch = int(news["lost_of"])
        self.note_lost(self.lost_epoch, bool(news["is_silent"]))

    def take_over(self, member: str) -> bool:
        """Return whether ``member``, which has this worker's rank, is gone and refused from now on.

        Its lock need not be heeded then. False if the host does not answer.
        """
        try:
            answer = self._host.ask("take over", rank=self._identity.rank, member=member)
        except (HostError, RefusedError):
            return False
        return bool(answer["is_yours"])

    def leave(self) -> None:
        """Close the connections: another process may have this worker's rank."""
        if self._epoch:
            with suppress(HostError, RefusedError):
                self._host.ask("bye", member=self.member, limit_seconds=_BYE_SECONDS)
        self._presence.end()
        self._host.close()

    def say_over(self, reason: str = "") -> None:
        """Say that the job is done, so that agents and workers that stand by end.

        Args:
            reason: why it cannot continue: then no agent starts a worker again; empty: it is done.
        """
        with suppress(HostError, RefusedError):
            self._host.ask("over", reason=reason, limit_seconds=_BYE_SECONDS)

    def count_failure(self, reason: str) -> int:
        """Return how many processes of this rank, one after the other, ended by this error."""
        with suppress(HostError, RefusedError):
            told = {"rank": self._identity.rank, "who": own_name(), "reason": reason}
            return int(self._host.ask("failed", **told, limit_seconds=_BYE_SECONDS)["times"])
        return 1

    def say_waiting(self, epoch: int, is_waiting: bool) -> tuple[list[int], bool] | None:
        """Say whether this worker has waited long for others of a round; from any thread.

        If all do, the host has the round end.

        Returns:
            Workers that do not, some of them; and whether this one is the first of those that do.
            None: the host does not answer, or the round is over.
        """
        told = {"rank": self._identity.rank, "epoch": epoch, "is_waiting": is_waiting}
        with suppress(HostError, RefusedError):
            answer = self._host.ask("waiting", **told)
            return list(answer["others"]), bool(answer["is_first"])
        return None

    def note(self, key: str) -> None:
        """Leave a note for the whole job, beyond this round, if the host answers."""
        try:
            self._host.ask("write", key=key, text="1")
        except HostError as error:
            logger.warning("could not note %r: %s", key, error)

    def all_noted(self, keys: list[str]) -> bool:
        """Return whether all these notes were left; False if the host does not answer."""
        try:
            return bool(keys) and bool(self._host.ask("has", **named(keys))["are_there"])
        except HostError:
            return False

    def _wait_for_all(self, deadline: float) -> str:
        token = uuid.uuid4().hex
        missing = _NO_ANSWER
        reported, untrusted_since = time.monotonic(), None
        held_since: float | None = None
        while True:
            if self.is_leaving():
                raise LeavingError
            error: HostError | None = None
            try:
                answer = self._meet(token, deadline)
                if answer["round"] is not None:
                    roster, machines, ended = wire.unpack(answer["members"])
                    self.ended = dict(ended)
                    self._epoch, self._roster = answer["epoch"], tuple(roster)
                    self.machines = tuple(machines)
                    return str(answer["round"])
                missing, untrusted_since = _missing(answer["missing"], answer["num_missing"]), None
                held_since = self._look_at_holder(answer["held_by"], held_since)
            except HostError as caught:
                error = caught
                missing = _NO_ANSWER
                logger.info("%s; trying again", error)
                untrusted_since = untrusted_since or time.monotonic()
                if not isinstance(error, UntrustedHostError):
                    untrusted_since = None
                elif time.monotonic() > untrusted_since + UNTRUSTED_SECONDS:
                    raise self._end(
                        f"{error}; give the rendezvous' host and all workers the same "
                        "CPR_JOB_SECRET_FILE"
                    ) from error
                time.sleep(_RETRY_SECONDS)
            if time.monotonic() >= deadline:
                raise self._join_failed(missing, error) from error
            if time.monotonic() > reported + _REPORT_SECONDS:
                logger.info("waiting at %s%s", place_of(self._identity), missing)
                reported = time.monotonic()

    def _meet(self, token: str, deadline: float) -> dict[str, Any]:
        """Wait for a heartbeat's time at most; the next call is the next sign of life."""
        heartbeat = max(
            self._time_outs.heartbeat_seconds, self._identity.world_size / _HEARTBEATS_PER_SECOND
        )
        left = min(heartbeat, max(0.0, deadline - time.monotonic()))

        def ask(*, shows_roster: bool) -> dict[str, Any]:
            return self._host.ask(
                "meet",
                claim=self._claim(shows_roster),
                token=token,
                seconds=left,
                lease_seconds=heartbeat * _MISSED_HEARTBEATS,
                limit_seconds=left + self._host.answer_seconds,
            )

        answer = ask(shows_roster=False)
        return ask(shows_roster=True) if answer.get("asks_roster") else answer

    def _claim(self, shows_roster: bool) -> dict[str, Any]:
        return {
            "rank": self._identity.rank,
            "world_size": self._identity.world_size,
            "member": self.member,
            "epoch": self._epoch,
            "roster": self._roster if shows_roster else (),
            "run": "" if self.run is None else self.run.run,
            "seen": 0 if self.run is None else self.run.epoch,
            "who": own_name(),
        }

    def _look_at_holder(self, holder: str, since: float | None) -> float | None:
        """Return since when a living process has this rank; raise if that takes too long."""
        if not holder:
            return None
        since = since or time.monotonic()
        seconds = self._time_outs.identity_seconds
        if time.monotonic() > since + seconds:
            raise RendezvousError(
                f"worker {self._identity.rank} is {holder}, which is connected to the rendezvous "
                f"after {seconds:g} s; give each worker a rank of its own, or end that process if "
                "it hangs"
            )
        return since

    def _join_failed(self, missing: str, error: Exception | None) -> RendezvousError:
        absent = "" if missing == _NO_ANSWER else ", which did not come"
        return self._end(
            f"worker {self._identity.rank} waited {self._time_outs.join_seconds:g} s at "
            f"{place_of(self._identity)}{missing}{absent}{'' if error is None else f' ({error})'}",
            ". Start them again, or restart the job: it resumes from the stores",
        )

    def _end(self, reason: str, remedy: str = "") -> RendezvousError:
        self.say_over(reason)
        return RendezvousError(reason + remedy)


def _missing(ranks: list[int], number: int) -> str:
    more = number - len(ranks)
    named = ", ".join(map(str, ranks)) + (f" and {more} more" if more else "")
    return f" for workers {named or 'that have just left'}"
