"""Short notes that the workers of a job leave for each other at the host of the rendezvous."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from cpr_ext.distributed.rendezvous.host_connection import HostConnection

Answer = TypeVar("Answer")
_LOOK_SECONDS = 0.05
_asking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Notes:
    """The notes of one job.

    Raises:
        HostError: every method, if the host does not answer.
    """

    def __init__(self, host: HostConnection) -> None:
        self._host = host

    def read(self, key: str) -> str:
        """Return the note, empty if there is none."""
        return str(self._host.ask("read", key=key)["text"] or "")

    def write(self, key: str, text: str) -> None:
        """Leave a note, in place of one that may be there."""
        self._host.ask("write", key=key, text=text)

    def has(self, keys: list[str]) -> bool:
        """Return whether all these notes were left."""
        return bool(self._host.ask("has", **named(keys))["are_there"])


def named(keys: Sequence[str]) -> dict[str, Any]:
    """Return what a request names ``keys`` by: the folder of all is said once."""
    prefix = keys[0][: keys[0].rfind("/") + 1] if keys else ""
    if not all(key.startswith(prefix) for key in keys):
        prefix = ""
    return {"prefix": prefix, "keys": [key[len(prefix) :] for key in keys]}


def call_with_timeout(
    seconds: float, who: str, call: Callable[[], Answer], until: threading.Event | None = None
) -> Answer:
    """Return or raise what ``call`` does; abandon its thread if it takes longer.

    Args:
        until: once it is set nobody needs the answer.

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
    _asking.add(thread)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
        if until is not None and until.is_set():
            break
        thread.join(left if until is None else min(left, _LOOK_SECONDS))
    if errors:
        raise errors[0]
    if not answers:
        raise dist.DistNetworkError(f"{who} does not answer")
    return answers[0]


def wait_for_left_behind(seconds: float) -> None:
    """Wait for each thread that :func:`call_with_timeout` abandoned, at most ``seconds``."""
    for thread in list(_asking):
        thread.join(seconds)
