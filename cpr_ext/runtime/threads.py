"""Threads that the interpreter must not meet inside the native core when it ends.

A program may end without closing its Checkpointer, or while an impatient user presses Ctrl-C. A
daemon thread that is in native code then is torn off the stack by the interpreter, which aborts the
process.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol


class _Closable(Protocol):
    def close(self, timeout_seconds: float | None = None) -> None: ...


# A commit that hangs on a dead disk does not keep the program from ending.
_PATIENCE_SECONDS = 60.0
# The owner of each thread, and the process that has it: a forked child has not.
_owners: weakref.WeakKeyDictionary[_Closable, int] = weakref.WeakKeyDictionary()
# Those of owners that are garbage, too: they were asked to end, and may not have yet.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_at_exit(owner: _Closable, thread: threading.Thread) -> None:
    """Have ``owner`` close its thread before the interpreter ends, if it is still there.

    ``owner.close(timeout_seconds)`` may be called again after an interrupt, and at any moment after
    this call. An owner that goes asks its thread to end, which is then waited for.
    """
    _owners[owner] = os.getpid()
    _threads.add(thread)


@atexit.register
def _close_all() -> None:
    with _interrupts_ignored():
        for owner, pid in reversed(list(_owners.items())):  # the newer ones may need the older
            if pid == os.getpid():
                _close(owner)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for thread in list(_threads):
            if thread.is_alive():  # so none is that a forked child does not have
                thread.join(max(deadline - time.monotonic(), 0.0))


def _close(owner: _Closable) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with suppress(Exception):
                owner.close(timeout_seconds=max(deadline - time.monotonic(), 0.0))
        except KeyboardInterrupt:  # pressed before it was ignored
            continue
        return


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore further Ctrl-C inside the block: the first one has ended the program."""
    if threading.current_thread() is not threading.main_thread():
        yield  # an interpreter inside another program, whose signals are not ours
        return
    previous = signal.getsignal(signal.SIGINT)
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt:
            continue
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
