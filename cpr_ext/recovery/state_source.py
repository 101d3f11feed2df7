"""Where a recovered state came from, and how old it was."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SourceKind = Literal["own store", "copy", "other stores"]


@dataclass(frozen=True)
class StateSource:
    """Where a recovered state came from.

    Attributes:
        kind: ``own store``: the directory of this job. ``copy``: object storage, as the directory
            was empty. ``other stores``: those of ``from_store``.
        place: the directory, the address, or the directories.
        age_seconds: time since the state was saved, by the clocks of both machines; None: not
            known. What was trained after it and before the failure is lost. How much that is, a
            copy does not show.
    """

    kind: SourceKind
    place: str
    age_seconds: float | None = None

    def __str__(self) -> str:
        age = "" if self.age_seconds is None else f", saved {self.age_seconds:.0f} s ago"
        return f"{self.kind} ({self.place}){age}"


def age_of(path: Path) -> float | None:
    """Return how long ago a file was written; None: it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
