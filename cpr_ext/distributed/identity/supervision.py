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
        _write(Path(path), reason)


def report_left(reason: str) -> None:
    """Say that another process has this worker's rank, so that it must not be started again here.

    The job continues without it.
    """
    if (path := os.environ.get(ALIVE)) is not None:
        _write(_beside(path, "left"), reason)


def report_failure(reason: str) -> None:
    """Say by which error this process is about to end."""
    if (path := os.environ.get(ALIVE)) is not None:
        _write(_beside(path, "failed"), reason.partition("\n")[0])


def report_done() -> None:
    """Say that this worker's part of the job is done: without it, an end is a death."""
    if (path := os.environ.get(ALIVE)) is not None:
        _write(_beside(path, "done"), "")


def show_progress(text: str) -> None:
    """Show one line on a long task of this worker, in place of the one before."""
    if (path := os.environ.get(ALIVE)) is not None:
        new = Path(f"{path}.new")
        with suppress(FileNotFoundError):  # the supervisor has ended
            new.write_text(text)
            new.replace(_beside(path, "progress"))  # so that nobody reads half a line


def _write(path: Path, text: str) -> None:
    """Write a file, also where a cleaner of temporary files has removed its folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(text)


def _beside(path: str | os.PathLike[str], kind: str) -> Path:
    return Path(f"{os.fspath(path)}.{kind}")


def _begin_of(path: Path) -> str:
    with suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(_MOST_BYTES).decode(errors="replace")
    return ""


class SignsOfLife:
    """The supervisor's side, for one life of one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _write(path, "")
        for kind in ("progress", "left", "failed", "done"):
            _beside(path, kind).unlink(missing_ok=True)
        self._started_ns = self._changed_ns()
        self._seen_ns, self._seen_at = self._started_ns, time.monotonic()

    def silent_seconds(self) -> float:
        """Return how long ago a look first found the last sign, by a clock that nobody sets."""
        if (newest := self._changed_ns()) != self._seen_ns:
            self._seen_ns, self._seen_at = newest, time.monotonic()
        return time.monotonic() - self._seen_at

    def is_done(self) -> bool:
        """Return whether this worker's part of the job is done."""
        return _beside(self.path, "done").exists()

    def was_alive(self) -> bool:
        """Return whether there was a sign of life since the start."""
        return self._changed_ns() != self._started_ns

    def progress(self) -> str:
        """Return the newest line of :func:`show_progress`; empty if there is none."""
        return _begin_of(_beside(self.path, "progress"))

    def left(self) -> str:
        """Return why this worker left the job to another process; empty if it did not."""
        return _begin_of(_beside(self.path, "left"))

    def failure(self) -> str:
        """Return by which error this worker has ended; empty: it did not say."""
        return _begin_of(_beside(self.path, "failed"))

    def reason(self) -> str:
        """Return why this worker aborted the job; empty if it did not."""
        return _begin_of(self.path)

    def _changed_ns(self) -> int:
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:  # removed: later signs of life are to be seen again
            _write(self.path, "")
            return self.path.stat().st_mtime_ns
