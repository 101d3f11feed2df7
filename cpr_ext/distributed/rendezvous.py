"""Where workers meet: torch elastic's rendezvous, used as a library.

Each round is a rendezvous of its own. Whoever leaves it closes it, and whoever finds it closed goes
to the next, so that nobody has to wait until the sign of life of a dead worker has expired. The
rendezvous says when all are there; a worker's rank is its identity, whatever rank it got there.

All of it goes through a store that one process hosts (:mod:`cpr_ext.distributed.rendezvous_host`);
training itself does not need that store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError as TorchRendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from cpr_ext.distributed.identity import Identity, TimeOuts, show_alive
from cpr_ext.distributed.notes import ANSWER_SECONDS, Notes, connect, place_of, within
from cpr_ext.errors import RendezvousError

logger = logging.getLogger("cpr_ext")

_MISSED_HEARTBEATS = 5
_TELL_SECONDS = 10.0  # between two lines about a long wait
_GRACE_SECONDS = 1.0  # in which the handler takes itself off the list
_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.03
_ROUND = "round"
_NOT_WAITING = "-"
# Else the first of a round hosts one more store, which nobody here needs.
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_HOST_ERRORS = (TorchRendezvousError, dist.DistNetworkError, dist.DistStoreError)


class Rendezvous:
    """One worker's seat at the rendezvous; kept over rounds, renewed if the host was restarted."""

    def __init__(self, identity: Identity, time_outs: TimeOuts) -> None:
        self._identity = identity
        self._time_outs = time_outs
        self._handler: DynamicRendezvousHandler | None = None
        self._notes = Notes(identity)
        self._waiter: threading.Thread | None = None
        os.environ[_NO_SHARED_STORE] = "1"

    def join(self) -> Store:
        """Leave the round this worker was in, if any, and meet all other workers in a new one.

        Returns:
            The round's own store.

        Raises:
            RendezvousError: they were not all there within ``join_seconds``, names those missing;
                or two processes have this worker's rank.
        """
        deadline = time.monotonic() + self._time_outs.join_seconds
        while True:
            try:
                self._leave()
                return self._next_round(deadline)
            except _HOST_ERRORS as error:
                if time.monotonic() >= deadline:
                    raise self._give_up(error) from error
                if not isinstance(error, RendezvousClosedError):
                    logger.info("rendezvous at %s: %s; trying again", self._place(), error)
                    self._notes.reconnect()
                    time.sleep(_RETRY_SECONDS)

    def note(self, key: str) -> None:
        """Leave a note for the whole job, beyond this round, if the host answers."""
        try:
            self._notes.write(key, "1")
        except _HOST_ERRORS as error:
            logger.warning("could not note %r at %s: %s", key, self._place(), error)

    def all_noted(self, keys: list[str]) -> bool:
        """Whether all these notes were left; False if the host does not answer."""
        try:
            return self._notes.has(keys)
        except _HOST_ERRORS:
            return False

    def _leave(self) -> None:
        """Close the round: whoever comes to it goes to the next, and so will this worker."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        if self._waiter is not None:
            self._waiter.join(_GRACE_SECONDS)
        if not within(ANSWER_SECONDS, self._place(), handler.shutdown):
            logger.info("round %s could not be closed at %s", handler.get_run_id(), self._place())
        number = int(handler.get_run_id().rpartition(".")[2])
        self._notes.replace(_ROUND, str(number), str(number + 1))

    def _next_round(self, deadline: float) -> Store:
        number = int(self._notes.replace(_ROUND, "", "0"))
        handler = self._handler = self._make_handler(number)
        waiting, token = self._waiting_key(self._identity.rank), uuid.uuid4().hex
        self._notes.write(waiting, token)
        outcome: list[Exception | None] = []

        def wait() -> None:
            try:
                handler.next_rendezvous()
                outcome.append(None)
            except Exception as error:
                outcome.append(error)

        # On a thread, for the handler's own time limit does not cover every state it can be in.
        self._waiter = threading.Thread(target=wait, name="cpr_ext-rendezvous", daemon=True)
        self._waiter.start()
        told = time.monotonic()
        while token not in (members := self._members(number)):
            if outcome:
                if (error := outcome[0]) is not None:
                    raise error
                self._announce(number, token)
                # Replaced by that of another process, if it is not named now.
                if token not in self._members(number):
                    raise RendezvousError(
                        f"two processes are worker {self._identity.rank}; give each worker a rank "
                        "of its own"
                    )
                continue
            if time.monotonic() > deadline + _GRACE_SECONDS:
                raise self._give_up(None)
            self._waiter.join(_POLL_SECONDS)
            show_alive()
            if time.monotonic() > told + _TELL_SECONDS:
                logger.info("waiting at %s for workers: %s", self._place(), self._missing())
                told = time.monotonic()
        self._notes.write(waiting, _NOT_WAITING)
        return PrefixStore(f"cpr_ext/{self._identity.job}/{members}", connect(self._identity))

    # Who completes a round says so, as the others' handlers look only once a second.
    def _members(self, number: int) -> str:
        """The tokens of those who are in the round, once it is complete; before, nothing."""
        return self._notes.read(f"members/{number}")

    def _announce(self, number: int, token: str) -> None:
        # Read first: whoever is named takes its token away, but then this is not what it was.
        known = self._members(number)
        if token in known:
            return
        tokens = [self._token(rank) for rank in range(self._identity.world_size)]
        self._notes.replace(f"members/{number}", known, "+".join(tokens))

    # One connection each: a wait on one holds up whoever shares it, and heartbeats must go on.
    def _make_handler(self, number: int) -> DynamicRendezvousHandler:
        run_id, world_size = f"{self._identity.job}.{number}", self._identity.world_size
        store, state_store = connect(self._identity), connect(self._identity)

        def prepare() -> C10dRendezvousBackend:
            # The handler waits for the round's first to say where a store of its own is. Nobody
            # here needs it, and whoever completes the round would wait a second for it.
            said = PrefixStore(f"torch.rendezvous.{run_id}.0", store)
            said.set(RendezvousStoreInfo.MASTER_ADDR_KEY, "unused")
            said.set(RendezvousStoreInfo.MASTER_PORT_KEY, "0")
            return C10dRendezvousBackend(state_store, run_id)

        limit = timedelta(seconds=max(1.0, self._time_outs.join_seconds))
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            run_id,
            store,
            within(ANSWER_SECONDS, self._place(), prepare),
            min_nodes=world_size,
            max_nodes=world_size,
            local_addr=self._identity.address,
            timeout=RendezvousTimeout(join=limit, last_call=timedelta(seconds=1)),
            # Handed to a timedelta, which takes fractions.
            keep_alive_interval=self._time_outs.heartbeat_seconds,  # type: ignore[arg-type]
            keep_alive_max_attempt=_MISSED_HEARTBEATS,
        )
        return handler

    def _give_up(self, error: Exception | None) -> RendezvousError:
        return RendezvousError(
            f"worker {self._identity.rank} waited {self._time_outs.join_seconds:g} s at "
            f"{self._place()} for workers {self._missing()}, which did not come"
            f"{'' if error is None else f' ({error or type(error).__name__})'}. Start them again, "
            "or restart the job: it goes on from the stores"
        )

    def _missing(self) -> str:
        ranks = range(self._identity.world_size)
        try:
            missing = [rank for rank in ranks if self._token(rank) == _NOT_WAITING]
        except _HOST_ERRORS:
            return "unknown, as the rendezvous does not answer"
        return ", ".join(map(str, missing)) or "that have just left"

    def _token(self, rank: int) -> str:
        return self._notes.read(self._waiting_key(rank)) or _NOT_WAITING

    def _waiting_key(self, rank: int) -> str:
        return f"waiting/{rank}"

    def _place(self) -> str:
        return place_of(self._identity)
