"""The store of one round, by which torch's process groups find each other, at our own host.

torch's ``TCPStore`` obeys any process that reaches its port. Here every value comes from a process
that knows the job's secret, as data.
"""

from __future__ import annotations

import atexit
import base64
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.host_connection import (
    HostConnection,
    HostError,
    RefusedError,
)

Answer = TypeVar("Answer")
_LOOK_SECONDS = 0.05
_asking: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_TIME_OUT = timedelta(seconds=60)
_PATIENCE_SECONDS = 2.0  # at the interpreter's end
_SLICE_SECONDS = 2.0  # of a long wait, so that a host that died is noticed


class RoundStore(Store):
    """A store of torch's kind, for the members of one round.

    Raises:
        dist.DistNetworkError: every method, if the host does not answer.
        dist.DistStoreError: what is waited for was not set in time, or the round is over.
    """

    def __init__(self, host: HostConnection, round_id: str) -> None:
        super().__init__()
        self._host = host
        self._prefix = f"round/{round_id}/"
        self._time_out = _TIME_OUT
        _stores.add(self)

    # Torch calls these by name, some with positional arguments only.
    def set(self, key: str, value: str | bytes) -> None:
        """Set a value in place of any that is there."""
        self._ask("write", key=self._prefix + key, text=_to_text(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return all these values once all are there: one answer, however many they are."""
        return self._gather(keys, self._time_out)

    def has_extended_api(self) -> bool:
        """Have gloo ask for the values of all members at once."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are there."""
        return bool(self._ask("has", **self._named(keys))["are_there"])

    def wait(self, keys: Sequence[str], time_out: timedelta | None = None) -> None:
        """Return once all these values are there."""
        self._gather(keys, time_out or self._time_out)

    def set_timeout(self, time_out: timedelta) -> None:
        """Wait for so long where a call does not say."""
        self._time_out = time_out

    def _gather(self, keys: Sequence[str], time_out: timedelta) -> list[bytes]:
        deadline = time.monotonic() + time_out.total_seconds()
        while True:
            left = min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))
            answer = self._ask(
                "gather",
                **self._named(keys),
                seconds=left,
                limit_seconds=self._host.answer_seconds + left,
            )
            if (packed := answer["values"]) is not None:
                return [base64.b64decode(text) for text in wire.unpack(packed)]
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(_describe(answer, len(self._prefix), len(keys)))

    def _named(self, keys: Sequence[str]) -> dict[str, Any]:
        return named([self._prefix + key for key in keys])

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        try:
            return self._host.ask(what, **values)
        except HostError as error:
            raise dist.DistNetworkError(str(error)) from error
        except RefusedError as error:
            raise dist.DistStoreError(str(error)) from error


def named(keys: Sequence[str]) -> dict[str, Any]:
    """Return what a request names ``keys`` by: the folder of all is said once."""
    prefix = keys[0][: keys[0].rfind("/") + 1] if keys else ""
    if not all(key.startswith(prefix) for key in keys):
        prefix = ""
    return {"prefix": prefix, "keys": [key[len(prefix) :] for key in keys]}


def call_with_timeout(
    seconds: float, who: str, call: Callable[[], Answer], until: Callable[[], bool] | None = None
) -> Answer:
    """Return or raise what ``call`` does; abandon its thread if it takes longer.

    Args:
        until: asked often; once it is true nobody needs the answer.

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
        if until is not None and until():
            break
        thread.join(left if until is None else min(left, _LOOK_SECONDS))
    if errors:
        raise errors[0]
    if not answers:
        raise dist.DistNetworkError(f"{who} does not answer")
    return answers[0]


def _describe(answer: dict[str, Any], prefix_size: int, number: int) -> str:
    missing = [str(key)[prefix_size:] for key in answer["missing"]]
    more = int(answer["num_missing"]) - len(missing)
    return (
        f"{int(answer['num_missing'])} of {number} values were not there in time: "
        f"{', '.join(missing)}{f' and {more} more' if more else ''}"
    )


def _to_text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


# A thread that is in torch's native code, waits in a store and wakes while the interpreter ends is
# torn off the stack, which aborts the process.
_stores: weakref.WeakSet[RoundStore] = weakref.WeakSet()


@atexit.register
def _end_waits() -> None:
    for store in list(_stores):
        store._host.interrupt()
    for thread in list(_asking):  # that a call has abandoned
        thread.join(_PATIENCE_SECONDS)
