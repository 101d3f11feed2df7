"""What a campaign has tried, in a file: one that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
NOT_OVER = 3  # exit status of a campaign that was stopped by its time, having found nothing


class Notes:
    """What was told of each try, by the try's name.

    Args:
        path: of the file, made if need be; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.told: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # else the process was stopped there
                    self.told.update(json.loads(line))
        self._file = path.open("a") if path is not None else None

    def add(self, name: str, told: Any) -> None:
        """Keep what is told of a try; JSON can hold it."""
        self.told[name] = told
        if self._file is not None:
            print(json.dumps({name: told}), file=self._file, flush=True)


class Clock:
    """Ends what is asked of it once its time is over."""

    def __init__(self, seconds: float | None) -> None:
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self.is_over = False

    def until_over(self, things: Iterable[T]) -> Iterator[T]:
        """As long as there is time."""
        for thing in things:
            if time.monotonic() > self._end:
                self.is_over = True
                return
            yield thing


def add_options(parser: argparse.ArgumentParser) -> None:
    """What lets a campaign be run in pieces."""
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="keep what was tried there, and go on from it"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"begin nothing after so long; status {NOT_OVER}: not over"
    )


def open_notes(resume: Path | None, name: str) -> Notes:
    """The notes below a directory that ``--resume`` names."""
    if resume is None:
        return Notes(None)
    resume.mkdir(parents=True, exist_ok=True)
    return Notes(resume / f"{name}.jsonl")


def still_to_do(things: Iterable[T], notes: Notes, name_of: Callable[[T], str]) -> Iterator[T]:
    """Those that were not tried yet."""
    return (thing for thing in things if name_of(thing) not in notes.told)
