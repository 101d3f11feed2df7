"""The store of one round, by which torch's process groups find each other, at our own host.

torch's ``TCPStore`` obeys any process that reaches its port. Here every value comes from a process
that knows the job's secret, as data.
"""

from __future__ import annotations

import atexit
import base64
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpr_ext.distributed.rendezvous.coordination_store import wait_for_left_behind
from cpr_ext.distributed.rendezvous.host_connection import (
    ANSWER_SECONDS,
    HostConnection,
    HostError,
    RefusedError,
)

_TIME_OUT = timedelta(seconds=60)
_PATIENCE_SECONDS = 2.0  # at the interpreter's end
_SLICE_SECONDS = 2.0  # of a long wait, so that a host that died is noticed


class RoundStore(Store):
    """A store of torch's kind, for the members of one round.

    Raises:
        dist.DistNetworkError: every method, if the host does not answer.
        dist.DistStoreError: what is waited for was not set in time.
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

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        self.wait([key])
        return _to_bytes(self._ask("read", key=self._prefix + key)["text"])

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these values are there."""
        return self._are_there(keys, 0.0)

    def wait(self, keys: Sequence[str], time_out: timedelta | None = None) -> None:
        """Return once all these values are there."""
        left = (time_out or self._time_out).total_seconds()
        while left > 0:
            if self._are_there(keys, min(left, _SLICE_SECONDS)):
                return
            left -= _SLICE_SECONDS
        raise dist.DistStoreError(f"{', '.join(keys)}: not there in time")

    def set_timeout(self, time_out: timedelta) -> None:
        """Wait for so long where a call does not say."""
        self._time_out = time_out

    def _are_there(self, keys: Sequence[str], seconds: float) -> bool:
        named = [self._prefix + key for key in keys]
        limit = ANSWER_SECONDS + seconds
        answer = self._ask("wait", keys=named, seconds=seconds, limit_seconds=limit)
        return bool(answer["are_there"])

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        try:
            return self._host.ask(what, **values)
        except HostError as error:
            raise dist.DistNetworkError(str(error)) from error
        except RefusedError as error:
            raise dist.DistStoreError(str(error)) from error


def _to_text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def _to_bytes(text: str) -> bytes:
    return base64.b64decode(text)


# A thread that is in torch's native code, waits in a store and wakes while the interpreter ends is
# torn off the stack, which aborts the process.
_stores: weakref.WeakSet[RoundStore] = weakref.WeakSet()


@atexit.register
def _end_waits() -> None:
    for store in list(_stores):
        store._host.interrupt()
    wait_for_left_behind(_PATIENCE_SECONDS)
