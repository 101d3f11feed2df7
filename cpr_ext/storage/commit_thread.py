"""The background thread that changes manifests: the only one that does."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.threads import close_at_exit

logger = logger_of("saving")

T = TypeVar("T")


class IdleWork(Protocol):
    """Something that is done piece by piece while no manifest is to be changed."""

    def advance(self) -> float | None:
        """Do a piece; return the seconds to wait before the next one, None after the last."""


class CommitThread:
    """Commits snapshots, and makes other changes of manifests, in the order handed over.

    Its thread ends with :meth:`close`, or after the last change once nothing else refers to it.
    """

    def __init__(self) -> None:
        # A change keeps its committer alive, the waiting thread does not.
        self._queue: _Queue = queue.SimpleQueue()
        self._idle: _Idle = []
        self._thread = threading.Thread(
            target=_serve, args=(self._queue, self._idle), name="cpr_ext-committer", daemon=True
        )
        weakref.finalize(self, self._queue.put, None).atexit = False
        close_at_exit(self, self._thread)  # first: an interrupt may come between the two
        self._thread.start()

    def submit(self, change: Callable[[], None]) -> None:
        """Hand over a change of manifests that keeps its own error for the waiting thread."""
        self._queue.put((self, change))

    def call(self, change: Callable[[], T]) -> Future[T]:
        """Hand a change of manifests over; its result or error is in the future."""
        future: Future[T] = Future()
        self._queue.put((self, partial(_resolve, future, change)))
        return future

    def do_when_idle(self, work: IdleWork) -> None:
        """Do this work in place of other such work; called by a change, on the thread of changes.

        Work that nothing else refers to is dropped.
        """
        self._idle[:] = [weakref.ref(work)]

    def close(self, timeout_seconds: float | None = None) -> None:
        """Do what was handed over, then end the thread; or leave it to itself after a while.

        It may be called again, also after an interrupt.
        """
        self._queue.put(None)
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(timeout_seconds)


_Queue = queue.SimpleQueue[tuple[CommitThread, Callable[[], None]] | None]
_Idle = list[weakref.ref[IdleWork]]


def _resolve(future: Future[T], change: Callable[[], T]) -> None:
    try:
        future.set_result(change())
    except BaseException as error:
        future.set_exception(error)
        del future  # which has the error, which has this frame: a circle keeps a store open


def _serve(changes: _Queue, idle: _Idle) -> None:
    pause = 0.0
    while True:
        try:
            item = changes.get(timeout=pause) if idle else changes.get()
        except queue.Empty:
            pause = _advance(idle)
            continue
        if item is None:
            return
        committer, change = item
        try:
            change()
        except Exception:  # a bug, which must not end the thread that others wait for
            logger.exception("a change of the store failed")
        del item, committer, change  # while it waits it keeps nothing alive


def _advance(idle: _Idle) -> float:
    """Do a piece of the work in ``idle``, which is empty once it is done; return the pause."""
    pause = None
    try:
        work = idle[0]()
        pause = None if work is None else work.advance()
    except Exception:  # a bug, which must not end the thread that others wait for
        logger.exception("work between changes of the store failed")
    if pause is None:
        idle.clear()
    return pause or 0.0
