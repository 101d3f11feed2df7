"""``cpr watch``: the snapshots of a running job, in a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpr_ext.cli.numbers import Amount
from cpr_ext.cli.output import printable, size, store_argument, table_lines, world_size_option

if TYPE_CHECKING:
    from cpr_ext.tools.maintenance.watching import SnapshotStanding

#: A store whose newest snapshot is older than so many of its last interval is late, but never one
#: that is younger than this.
_LATE = 3
_LATE_SECONDS = 10.0


@click.command()
@store_argument
@world_size_option
@click.option(
    "--every",
    type=Amount(0.1, 86_400),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--late-after",
    type=Amount(0.0, 1e9),
    metavar="SECONDS",
    help="A store whose newest snapshot is older is late. Default: 3 times its last interval.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Look once. Exit code 1: damaged, missing, or late by --late-after.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each change.")
def watch(
    store: str,
    world_size: int | None,
    every: float,
    late_after: float | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show how far the snapshots of a job in STORE are, until Ctrl-C.

    One line per worker: its newest snapshot and how long ago it was committed, the newest
    full-recovery point, and steps per second between snapshots. On a terminal the lines are drawn
    again; elsewhere they are printed when something has changed. Training is never disturbed: only
    manifests are read. A job that has not begun is waited for.
    """
    from cpr_ext.errors import StoreError
    from cpr_ext.tools import maintenance

    screen = _Screen(is_terminal=sys.stdout.isatty() and not as_json and not once)
    pace = _Pace(late_after)
    last, is_waiting, is_refused = None, False, False
    with suppress(KeyboardInterrupt):
        while True:
            try:
                standings = maintenance.watch(store, world_size=world_size)
            except StoreError:
                is_empty = _is_empty(Path(store))
                if once or last is not None or (is_refused and not is_empty):
                    raise
                if is_empty and not is_waiting:
                    click.echo(printable(f"'{store}' has no store yet: waiting for one"), err=True)
                    is_waiting = True
                is_refused = not is_empty  # a store that is being made is one at the next look
                time.sleep(every)
                continue
            pace.note(standings)
            late = [pace.is_late(each) for each in standings]
            if (standings, late) != last or screen.is_terminal:
                if as_json:
                    pairs = zip(standings, late, strict=True)
                    stores = [{**asdict(each), "is_late": is_late} for each, is_late in pairs]
                    click.echo(json.dumps({"stores": stores}))
                else:
                    screen.draw(_lines(standings, pace))
            last = standings, late
            if once:
                is_late = late_after is not None and any(late)
                sys.exit(1 if is_late or any(each.trouble for each in standings) else 0)
            time.sleep(every)


def _is_empty(store: Path) -> bool:
    """Return whether a job may still begin here."""
    return not store.exists() or (store.is_dir() and not any(store.iterdir()))


class _Pace:
    """Which stores are late, and how fast training is between snapshots."""

    def __init__(self, late_after: float | None) -> None:
        self._late_after = late_after
        self._seen: dict[int | str, SnapshotStanding] = {}
        self.speeds: dict[int | str, float] = {}

    def note(self, standings: Sequence[SnapshotStanding]) -> None:
        for now in standings:
            then = self._seen.get(now.worker)
            if now.committed_at is None or (then is not None and then.snapshot == now.snapshot):
                continue
            self._seen[now.worker] = now
            if then is None or then.committed_at is None:
                continue
            seconds = now.committed_at - then.committed_at
            self.speeds.pop(now.worker, None)
            if seconds > 0 and now.snapshot > then.snapshot and now.step >= then.step:
                self.speeds[now.worker] = (now.step - then.step) / seconds

    def is_late(self, standing: SnapshotStanding) -> bool:
        """Return whether a store's newest snapshot is older than it should be."""
        limit = self._late_after
        if limit is None and standing.interval_seconds is not None:
            limit = max(_LATE_SECONDS, _LATE * standing.interval_seconds)
        if limit is None or standing.committed_at is None:
            return False
        return time.time() - standing.committed_at > limit


class _Screen:
    """Draws lines over those drawn before, if it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._height = 0

    def draw(self, lines: Sequence[str]) -> None:
        if self.is_terminal and self._height:
            click.echo(f"\x1b[{self._height}F\x1b[J", nl=False)
        width, height = _size_of_terminal() if self.is_terminal else (None, len(lines))
        shown = [line[:width] for line in lines]
        if len(shown) > height:
            shown = [*shown[: height - 1], f"... and {len(shown) - height + 1} more"[:width]]
        for line in shown:
            click.echo(line)
        self._height = len(shown)


def _size_of_terminal() -> tuple[int, int]:
    from shutil import get_terminal_size

    columns, rows = get_terminal_size()
    return max(columns - 1, 1), max(rows - 1, 2)


def _lines(standings: Sequence[SnapshotStanding], pace: _Pace) -> list[str]:
    now = time.time()
    rows = [_row(each, now, pace) for each in standings]
    head = ("worker", "snapshot", "step", "committed", "full at", "proven at", "steps/s", "size")
    lines = table_lines(head, rows)
    lines += [printable(f"{each.worker}: {each.trouble}") for each in standings if each.trouble]
    return lines


def _row(standing: SnapshotStanding, now: float, pace: _Pace) -> tuple[object, ...]:
    if standing.committed_at is None:
        return (standing.worker, *("-",) * 6, size(standing.file_bytes))
    age = max(0.0, now - standing.committed_at)
    speed = pace.speeds.get(standing.worker)
    return (
        standing.worker,
        standing.snapshot,
        standing.step,
        f"{_duration(age)} ago" + (", late" if pace.is_late(standing) else ""),
        "-" if standing.full_step is None else standing.full_step,
        "-" if standing.proven_step is None else standing.proven_step,
        "-" if speed is None else f"{speed:.3g}",
        size(standing.file_bytes),
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
