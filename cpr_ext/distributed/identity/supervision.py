"""What a worker shows the process that supervises it: signs of life, progress, an abort.

All of it goes through one file, which ``cpr launch`` makes for each worker's life, and one next to
it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from cpr_ext.distributed.identity.worker_identity import ALIVE

_MOST_BYTES = 4096


def report_abort(reason: str) -> None:
    """Say that the job cannot continue, so that starting this worker again would not help."""
    if (path := os.environ.get(ALIVE)) is not None:
        Path(path).write_text(reason)


def report_left(reason: str) -> None:
    """Say that another process has this worker's rank, so that it must not be started again here.

    The job continues without it.
    """
    if (path := os.environ.get(ALIVE)) is not None:
        _left_of(path).write_text(reason)


def report_done() -> None:
    """Say that this worker's part of the job is done: without it, an end is a death."""
    if (path := os.environ.get(ALIVE)) is not None:
        _done_of(path).write_text("")


def show_progress(text: str) -> None:
    """Show one line on a long task of this worker, in place of the one before."""
    if (path := os.environ.get(ALIVE)) is not None:
        new = Path(f"{path}.new")
        with suppress(FileNotFoundError):  # the supervisor has ended
            new.write_text(text)
            new.replace(_progress_of(path))  # so that nobody reads half a line


def _progress_of(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.progress")


def _left_of(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.left")


def _done_of(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.done")


class SignsOfLife:
    """The supervisor's side, for one life of one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")
        _progress_of(path).unlink(missing_ok=True)
        _left_of(path).unlink(missing_ok=True)
        _done_of(path).unlink(missing_ok=True)
        self._started_ns = path.stat().st_mtime_ns
        self._seen_ns, self._seen_at = self._started_ns, time.monotonic()

    def silent_seconds(self) -> float:
        """Return how long ago a look first found the last sign, by a clock that nobody sets."""
        if (newest := self.path.stat().st_mtime_ns) != self._seen_ns:
            self._seen_ns, self._seen_at = newest, time.monotonic()
        return time.monotonic() - self._seen_at

    def is_done(self) -> bool:
        """Return whether this worker's part of the job is done."""
        return _done_of(self.path).exists()

    def was_alive(self) -> bool:
        """Return whether there was a sign of life since the start."""
        return self.path.stat().st_mtime_ns != self._started_ns

    def progress(self) -> str:
        """Return the newest line of :func:`show_progress`; empty if there is none."""
        try:
            return _progress_of(self.path).read_text()
        except FileNotFoundError:
            return ""

    def left(self) -> str:
        """Return why this worker left the job to another process; empty if it did not."""
        with suppress(FileNotFoundError), _left_of(self.path).open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
        return ""

    def reason(self) -> str:
        """Return why this worker aborted the job; empty if it did not."""
        with self.path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
