"""What one process of a proof is to do, as JSON in a file; and what it notes of its life."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LifePlan:
    """The life of one process.

    Attributes:
        directory: where it notes what it sees, and where stores are.
        steps: it ends after this step.
        kill_after: or it saves all and dies at the end of this step; None: it does not.
        script, arguments: the program.
        seed: of all generators at the start. A process that recovers has another one than those
            that begin, as it would have by chance.
        world_size: processes of the job.
    """

    directory: str
    steps: int
    kill_after: int | None = None
    script: str = ""
    arguments: tuple[str, ...] = ()
    seed: int = 0
    world_size: int = 1

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> LifePlan:
        """Return the plan that a file holds."""
        plain = json.loads(path.read_text())
        return LifePlan(**{**plain, "arguments": tuple(plain["arguments"])})


@dataclass
class LifeNotes:
    """What happened in a life, one JSON object a line, in order."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: str, **more: Any) -> None:
        """Add an event."""
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    @staticmethod
    def read(path: Path) -> LifeNotes:
        """Return the notes of a file; none if it is not there."""
        text = path.read_text() if path.exists() else ""
        # A process that dies in the middle of a line leaves a part of it.
        lines = text.split("\n")[:-1]
        return LifeNotes(path, [json.loads(line) for line in lines])

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """Return the events of one kind."""
        return [each for each in self.events if each["event"] == event]
