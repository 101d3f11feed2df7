"""The background thread that changes manifests: the only one that does."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cpr_ext.runtime.threads import close_at_exit

logger = logging.getLogger("cpr_ext")

T = TypeVar("T")


class Committer:
    """Commits snapshots, and makes other changes of manifests, in the order handed over.

    Attributes:
        after_change: called on its thread after each change; None: nothing is.
    """

    def __init__(self) -> None:
        self.after_change: Callable[[], None] | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cpr_ext-committer", daemon=True)
        close_at_exit(self)  # first: an interrupt may come between the two
        self._thread.start()

    def submit(self, change: Callable[[], None]) -> None:
        """Hand over a change of manifests that keeps its own error for the waiting thread."""
        self._queue.put(change)

    def call(self, change: Callable[[], T]) -> Future[T]:
        """Hand a change of manifests over; its result or error is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(change())
            except BaseException as error:
                future.set_exception(error)

        self._queue.put(run)
        return future

    def close(self, timeout_seconds: float | None = None) -> None:
        """Do what was handed over, then end the thread; or leave it to itself after a while.

        It may be called again, also after an interrupt.
        """
        self._queue.put(None)
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
                if self.after_change is not None:
                    self.after_change()
            except Exception:  # a bug, which must not end the thread that others wait for
                logger.exception("a change of the store failed")
            del work  # while it waits it keeps nothing alive
