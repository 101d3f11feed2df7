"""The background thread that keeps a remote store up to date; training never waits for it."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from pathlib import Path

from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.threads import close_at_exit
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.origin import RemoteStatus
from cpr_ext.wings.remote.objects import brief
from cpr_ext.wings.remote.remote_state import step_of
from cpr_ext.wings.remote.remote_writer import FencedError, RemoteWriter

logger = logger_of("remote")

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
WARN_SECONDS = 600.0  # a copy that lags is reported so often at most
_END_SECONDS = 10.0


def _now() -> float:
    return time.monotonic()


class RemoteCopy:
    """Copies the newest committed state again and again; states that come meanwhile are skipped.

    It is a :class:`~cpr_ext.storage.origin.Origin` of its store.

    Args:
        bytes_per_second: None: no limit.
        wait_at_close_seconds: the most that :meth:`end` waits.
        read_from: the address from which the local store was read; empty: it existed.
    """

    def __init__(
        self,
        writer: RemoteWriter,
        *,
        bytes_per_second: float | None = None,
        wait_at_close_seconds: float = 60.0,
        read_from: str = "",
    ) -> None:
        self._writer = writer
        self._rate = bytes_per_second
        self._patience = wait_at_close_seconds
        self.read_from = read_from
        self._changed = threading.Condition()
        self._wanted: Manifest | None = None
        self._wanted_since = 0.0
        self._copying: Manifest | None = None
        self._is_stopped = False
        self._is_orphaned = False
        # The thread waits for these. A finalizer may put one in, which takes no lock.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._bytes_sent = 0
        self._free_at = 0.0  # when the bandwidth allows the next bytes
        self._failures = 0
        self._error = ""
        self._warned_at = _now()
        self._is_fenced = False
        writer.spend = self._spend
        self._thread = threading.Thread(target=self._run, name="cpr_ext-remote", daemon=True)

    @property
    def pinned(self) -> frozenset[str]:
        """The commits of which the copy is, or may be soon."""
        return self._writer.pinned

    def begin(self, manifest: Manifest) -> None:
        """Take over the copy, if this committed state follows from the one that is there.

        Raises:
            StoreError: it does not.
            RemoteError: a request failed, or the service ignores conditional writes.
        """
        self._writer.open(manifest)

    def fetch(self, record: SegmentRecord, path: Path) -> bool:
        """Replace a file of the local store by its copy; False if there is none.

        Raises:
            RemoteError, DamageError, OSError: it could not be read, or is not as written.
        """
        return self._writer.fetch(record, path)

    def on_commit(self, state: Manifest) -> None:
        """Take note of a newly committed state; returns at once."""
        with self._changed:
            if self._thread.ident is None:
                close_at_exit(self, self._thread)  # first: an interrupt may come between the two
                self._thread.start()
            if self._wanted is None and self._copying is None:
                self._wanted_since = _now()
            self._wanted = state
        self._wakes.put(None)
        self._warn_if_it_lags()

    def _warn_if_it_lags(self) -> None:
        """Report, each few minutes, how far the copy is from the newest committed state."""
        now = _now()
        with self._changed:
            lacking = self._wanted or self._copying
            since = max(self._wanted_since, self._warned_at)
            if lacking is None or self._is_ended or now - since < WARN_SECONDS:
                return
            self._warned_at = now
        status = self.status()
        has = f"has step {status.step}" if status.step >= 0 else "has no state yet"
        logger.warning(
            "the remote store lags: it %s, this store step %d; since %.0f s, %d bytes to send "
            "(%s). If this machine is lost now, so is what was trained since",
            *(has, step_of(lacking), status.lag_seconds, status.lag_bytes),
            status.error or "no request failed: bandwidth is too low, or the limit is",
        )

    def status(self) -> RemoteStatus:
        """Return how far the copy is."""
        with self._changed:
            newest, lacking = self._writer.newest, self._wanted or self._copying
            return RemoteStatus(
                step=-1 if newest is None else newest.step,
                lag_seconds=0.0 if lacking is None else _now() - self._wanted_since,
                lag_bytes=0 if lacking is None else self._writer.missing_bytes(lacking),
                bytes_sent=self._bytes_sent,
                failures=self._failures,
                error=self._error,
                is_fenced=self._is_fenced,
            )

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the newest state is there; False if the time ran out, or it never will."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._wanted is None and self._copying is None) or self._is_ended,
                timeout_seconds,
            )
            return self._wanted is None and self._copying is None and not self._is_fenced

    def end(self, *, waits: bool) -> None:
        """End the thread; wait before, for a bounded time, for the newest state to be there."""
        if waits and not self.wait(self._patience):
            status = self.status()
            logger.warning(
                "the remote store lacks the newest state; it has step %d, %d bytes lack (%s)",
                status.step,
                status.lag_bytes,
                status.error or f"not copied within {self._patience} s",
            )
        self.close(_END_SECONDS)  # a request in progress may take longer; it adds nothing then

    def close(self, timeout_seconds: float | None = None) -> None:
        """End the thread, in the middle of a state if need be; it may be called again."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._wakes.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def let_go(self) -> None:
        """End the thread once the newest state is there, or cannot be copied now.

        A finalizer calls it, so on any thread and whatever locks that holds.
        """
        self._is_orphaned = True
        self._wakes.put(None)

    @property
    def _is_ended(self) -> bool:
        return self._is_stopped or self._is_fenced

    def _copy_next(self) -> float | None:
        """Copy the wanted state; returns how long to pause, None: to the next change."""
        with self._changed:
            if self._wanted is None or self._is_ended:
                return None
            state, self._wanted, self._copying = self._wanted, None, self._wanted
        error: Exception | None = None
        started = _now()
        try:
            self._writer.copy(state)
        except Exception as raised:
            error = raised
        with self._changed:
            self._copying = None
            pause = self._note(state, error, started)
            self._changed.notify_all()
        return pause

    def _note(self, state: Manifest, error: Exception | None, started: float) -> float | None:
        if error is None:
            self._failures, self._error = 0, ""
            self._wanted_since = started  # what came meanwhile has waited since then at most
            return 0.0
        if self._wanted is None:
            self._wanted = state
        elif isinstance(error, FileNotFoundError):
            return 0.0  # that state is gone, and a newer one is known
        self._error = brief(error)
        if isinstance(error, SnapshotError):
            return None  # stopped
        self._failures += 1
        self._is_fenced = isinstance(error, FencedError)
        if self._is_fenced or self._failures == 1:
            logger.warning("copying to the remote store failed: %s", self._error)
        longest = min(self._failures - 1, 30)
        return min(FIRST_PAUSE_SECONDS * 2.0**longest, LONGEST_PAUSE_SECONDS)

    def _spend(self, count: int) -> None:
        with self._changed:
            self._bytes_sent += count
            if self._rate is not None:  # of all objects that are sent at a time
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + count / self._rate
                self._changed.wait_for(lambda: self._is_stopped, self._free_at - now)
            if self._is_stopped:
                raise SnapshotError("copying was stopped")

    def _run(self) -> None:
        while not self._is_ended:
            pause = self._copy_next()
            if self._is_orphaned and (pause or self._wanted is None):
                return
            self._warn_if_it_lags()
            if pause is None:
                self._wakes.get()
            else:  # a new state does not shorten the pause after a failure
                self._sleep(pause)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not (
            self._is_ended or self._is_orphaned
        ):
            with suppress(queue.Empty):
                self._wakes.get(timeout=left)
