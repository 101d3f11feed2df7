"""Campaigns of tries, noted in a file: one that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
NOT_OVER = 3  # exit status of a campaign that was stopped by its time, having found nothing


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser with what all campaigns can be told."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="tries at a time")
    parser.add_argument("--sample", type=int, help="so many tries, drawn, instead of all")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="keep what was tried there, and go on from it"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"begin nothing after so long; status {NOT_OVER}: not over"
    )
    return parser


class Campaign:
    """What was told of each try, by the try's name: ``found``, and numbers or lists.

    Args:
        kind_of: of a try's name; sums are told of each kind.
    """

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        kind_of: Callable[[str], str] = lambda name: name.split()[0],
    ) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # tell what was found until then
        self.told: dict[str, Any] = {}
        self.is_over = False
        self._kind_of = kind_of
        self._started = time.monotonic()
        seconds = options.seconds
        self._end = float("inf") if seconds is None else self._started + seconds
        self._file = None
        if options.resume is not None:
            options.resume.mkdir(parents=True, exist_ok=True)
            self._file = (options.resume / f"{name}.jsonl").open("a+")
            self._file.seek(0)
            for line in self._file:
                if line.endswith("\n"):  # else the process was stopped there
                    self.told.update(json.loads(line))

    def left(self, tries: Iterable[T], name_of: Callable[[T], str] = str) -> Iterator[T]:
        """Those that were not tried yet, as long as there is time."""
        for each in tries:
            if name_of(each) in self.told:
                continue
            if time.monotonic() > self._end:
                self.is_over = True
                return
            yield each

    def run(self, done: Iterable[tuple[str, dict[str, Any]]]) -> int:
        """Note what is told of tries, print the sums, return the exit status."""
        try:
            for name, told in tqdm(done, unit=" tries", smoothing=0, disable=None):
                self.told[name] = told
                if self._file is not None:
                    print(json.dumps({name: told}), file=self._file, flush=True)
                if told["found"]:
                    text = "\n    ".join([f"VIOLATION {name}", *told["found"]])
                    tqdm.write(text, file=sys.stdout)
        except KeyboardInterrupt:
            self.is_over = True
        sums: dict[str, Counter[str]] = defaultdict(Counter)
        for name, told in self.told.items():
            counts = {k: v if isinstance(v, int) else len(v) for k, v in told.items()}
            for kind in (self._kind_of(name), "all"):
                sums[kind].update({"tries": 1, **counts, "found": bool(told["found"])})
        total = sums.pop("all", Counter())
        print(f"\n{'':20}", *(f"{column:>10}" for column in total))
        for kind, count in [*sums.items(), ("all", total)]:
            print(f"{kind:20}", *(f"{count[column]:10}" for column in total))
        over = "not over: stopped before all was tried" if self.is_over else "over"
        print(f"{over}; {time.monotonic() - self._started:.0f} s")
        return 1 if total["found"] or not self.told else NOT_OVER if self.is_over else 0
