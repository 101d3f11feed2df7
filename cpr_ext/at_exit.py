"""Threads that the interpreter must not meet inside the native core when it ends.

A program may end without closing its Checkpointer. A daemon thread that is in native code then is
torn off the stack by the interpreter, which aborts the process.
"""

from __future__ import annotations

import atexit
import os
import weakref
from contextlib import suppress
from typing import Protocol


class _Closable(Protocol):
    def close(self, timeout_seconds: float | None = None) -> None: ...


# A commit that hangs on a dead disk does not keep the program from ending.
_PATIENCE_SECONDS = 60.0
# The owner of each thread, and the process that has it: a forked child has not.
_owners: weakref.WeakKeyDictionary[_Closable, int] = weakref.WeakKeyDictionary()


def close_at_exit(owner: _Closable) -> None:
    """Have ``owner`` close its thread before the interpreter ends, if it is still there."""
    _owners[owner] = os.getpid()


@atexit.register
def _close_all() -> None:
    for owner, pid in reversed(list(_owners.items())):  # the newer ones may need the older
        if pid == os.getpid():
            with suppress(Exception):
                owner.close(timeout_seconds=_PATIENCE_SECONDS)
