"""What a worker shows the process that supervises it: signs of life, and why it gave the job up.

All of it goes through one file, which ``cpr launch`` makes for each worker's life.
"""

from __future__ import annotations

import os
from pathlib import Path

from cpr_ext.distributed.identity.worker_identity import ALIVE

_MOST_BYTES = 4096


def report_abort(reason: str) -> None:
    """Say that the job cannot continue, so that starting this worker again would not help."""
    if (path := os.environ.get(ALIVE)) is not None:
        Path(path).write_text(reason)


class SignsOfLife:
    """The supervisor's side, for one life of one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")
        self._started_ns = path.stat().st_mtime_ns

    def silent_seconds(self, now: float) -> float:
        """Return how long ago the last sign was, at ``now`` (Unix seconds)."""
        return now - self.path.stat().st_mtime

    def was_alive(self) -> bool:
        """Return whether there was a sign of life since the start."""
        return self.path.stat().st_mtime_ns != self._started_ns

    def reason(self) -> str:
        """Return why this worker aborted the job; empty if it did not."""
        with self.path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
