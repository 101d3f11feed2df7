"""Short notes that the workers of a job leave for each other at the host of the rendezvous.

Torch's store has a time-out for some calls only: a host that is stopped, or behind a network that
was cut, would be waited for without end. Here every call is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from cpr_ext.distributed.identity import Identity

ANSWER_SECONDS = 5.0  # for one answer of the host

Answer = TypeVar("Answer")


class Notes:
    """The notes of one job, over a connection that is made when it is first needed.

    Raises:
        dist.DistNetworkError, dist.DistStoreError: every method, if the host does not answer.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._store: Store | None = None

    def read(self, key: str) -> str:
        """The note, empty if there is none."""
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else "")

    def write(self, key: str, text: str) -> None:
        """Leave a note, in place of one that may be there."""
        self._ask(lambda store: store.set(key, text))

    def replace(self, key: str, known: str, text: str) -> str:
        """Write ``text`` if the note is ``known``, empty for none; returns what it is now."""
        return self._ask(lambda store: store.compare_set(key, known, text).decode())

    def has(self, keys: list[str]) -> bool:
        """Whether all these notes were left."""
        return self._ask(lambda store: bool(store.check(keys)))

    def reconnect(self) -> None:
        """Have the next call make a new connection: the host may be another by now."""
        self._store = None

    def _ask(self, question: Callable[[Store], Answer]) -> Answer:
        store = self._store
        if store is None:
            store = self._store = PrefixStore(
                f"cpr_ext/{self._identity.job}", connect(self._identity)
            )
        return within(ANSWER_SECONDS, place_of(self._identity), lambda: question(store))


def connect(identity: Identity) -> TCPStore:
    """A connection of its own to the host; torch's time-out does not cover the host's greeting.

    Raises:
        dist.DistNetworkError, dist.DistStoreError: the host does not answer.
    """
    limit = timedelta(seconds=ANSWER_SECONDS)
    return within(
        ANSWER_SECONDS + 1.0,
        place_of(identity),
        lambda: TCPStore(identity.host, identity.port, is_master=False, timeout=limit),
    )


def place_of(identity: Identity) -> str:
    """Where the rendezvous is, as a person reads it."""
    return f"{identity.host}:{identity.port}"


def within(seconds: float, who: str, call: Callable[[], Answer]) -> Answer:
    """What ``call`` returns or raises; its thread is left behind if it takes longer.

    Raises:
        dist.DistNetworkError: it took longer; says ``who`` does not answer.
    """
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="cpr_ext-asks", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise dist.DistNetworkError(f"{who} does not answer")
    return answers[0]
