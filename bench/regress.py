"""What is slower than at another commit: both run in turns on this machine.

    python bench/regress.py BASE [--rounds 1.0] [--only NAME] [--keep FOLDER] [--json FILE]

BASE is a commit, which is checked out and built in a temporary folder (about a minute), or the
folder of a checkout that is built. Each commit is measured by its own bench/ and package, in a
process of its own that stays; the two take turns, round by round, each round in the other order.
All of it is done three times, in new processes. Compared are (bench/hot_path.py): watching a step,
pauses, bytes and speed of partial snapshots, pauses of base snapshots, and the operations of
counting, selecting and staging. `--rounds 3` measures three times as often. Needs 16 GB of memory.

A figure is slower if its median ratio over the rounds is above the tolerance in each of the three
times, and the 98 % interval of the median is, too. Exit code 1: something is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paired import median_interval

from cpr_ext.wings.lab.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: What is measured, in this order, and the rounds of each time.
PARTS = {
    "operations": 7,
    "base": 2,
    "snapshot": 6,
    "watching 128": 14,
    "watching 2048": 8,
}
TIMES = 3
#: Slower by less than so much is nothing. Watching is a ratio to the same step without it.
TOLERANCES = {"watched step over": 0.004, "bytes": 0.01, "step during": 0.02}
TOLERANCE = 0.05
#: Of medians, how many intervals do not hold the true one.
MISSED = 0.02

#: The values of each round, of each of the times.
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Verdict:
    """A figure of both commits; it is better the lower it is.

    Attributes:
        ratio: the median over the rounds of now over base, and low and high of its interval.
        tolerance: a ratio of up to one plus this is not slower.
    """

    figure: str
    base: float
    now: float
    ratio: float
    low: float
    high: float
    tolerance: float
    is_slower: bool
    is_faster: bool


def judge(figure: str, base: Rounds, now: Rounds) -> Verdict:
    """Compare the rounds of both commits, of each time that processes were started.

    A process may be slow as a whole, such as one that got no large pages: each time must show it.
    """
    tolerance = next((of for name, of in TOLERANCES.items() if figure.startswith(name)), TOLERANCE)
    ratios = [
        [after / before for before, after in zip(*time, strict=True)]
        for time in zip(base, now, strict=True)
    ]
    medians = [statistics.median(time) for time in ratios]
    all_ratios = [ratio for time in ratios for ratio in time]
    low, high = median_interval(all_ratios, missed=MISSED)
    return Verdict(
        figure,
        statistics.median(value for time in base for value in time),
        statistics.median(value for time in now for value in time),
        statistics.median(all_ratios),
        low,
        high,
        tolerance,
        is_slower=min(low, *medians) > 1 + tolerance,
        is_faster=max(high, *medians) < 1 / (1 + tolerance),
    )


class Measured:
    """A checkout in a process of its own, which measures a part when asked."""

    def __init__(self, checkout: Path, folder: Path, *, tiny: bool) -> None:
        folder.mkdir()
        command = [sys.executable, str(HERE / "hot_path.py"), str(checkout), str(folder)]
        self._process = subprocess.Popen(
            command + ["--tiny"] * tiny,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        self._checkout = checkout

    def answer(self) -> dict[str, float]:
        """The next answer; the first comes without being asked, when all is set up."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._checkout}: ended with {self._process.wait()}")
        return json.loads(line)

    def measure(self, part: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(part, file=self._process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def checked_out(base: str, kept: Path | None) -> Iterator[Path]:
    """A built checkout of a commit, gone afterwards if it is not to be kept."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="cpr_regress.") as folder:
        checkout = kept or Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), base], check=True)
        try:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{base} does not build:\n{done.stdout}{done.stderr}")
            yield checkout
        finally:
            if not kept:
                subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def measure_in_turns(
    checkouts: Sequence[Path], folder: str | None, parts: dict[str, int], first: int, *, tiny: bool
) -> list[dict[str, list[float]]]:
    """Run every part in both for its rounds; the values of each, by figure.

    Args:
        first: the checkout, 0 or 1, that starts and gets its memory first.
    """
    found: list[dict[str, list[float]]] = [{} for _ in checkouts]
    orders = [(first, 1 - first), (1 - first, first)]
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory("", "cpr_bench.", folder)))
        both = {}
        for index in orders[0]:
            both[index] = Measured(checkouts[index], own / str(index), tiny=tiny)
            stack.callback(both[index].end)
            both[index].answer()
        for part, rounds in parts.items():
            for number in range(rounds):
                for index in orders[number % 2]:
                    for figure, value in both[index].measure(part).items():
                        found[index].setdefault(figure, []).append(value)
    return found


def print_table(verdicts: Sequence[Verdict]) -> None:
    print(f"{'':<64}{'base':>12}{'now':>12}{'ratio':>8}   98 % of its median")
    for verdict in verdicts:
        mark = "SLOWER" if verdict.is_slower else "faster" if verdict.is_faster else ""
        print(
            f"{verdict.figure:<64}{show(verdict.figure, verdict.base):>12}"
            f"{show(verdict.figure, verdict.now):>12}{verdict.ratio:>8.3f}   "
            f"{verdict.low:.3f} to {verdict.high:.3f}  {mark}".rstrip()
        )


def show(figure: str, value: float) -> str:
    if figure.startswith("bytes"):
        return f"{value / 1e6:.2f} MB"
    return f"{value:.4f}" if " over one " in figure else f"{1e3 * value:.3f} ms"


def commit_of(checkout: Path) -> str:
    """The commit, with a + if tracked files differ from it."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="a commit, or the folder of a built checkout")
    parser.add_argument("--rounds", type=float, default=1.0, help="times the rounds of a quick run")
    parser.add_argument("--only", default="", help="parts whose names hold this")
    parser.add_argument("--keep", type=Path, help="check BASE out here, and leave it")
    parser.add_argument("--folder", help="where to write stores (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which show nothing")
    options = parser.parse_args()
    parts = {
        part: 2 if options.tiny else max(1, round(rounds * options.rounds))
        for part, rounds in PARTS.items()
        if options.only in part or part.startswith("base")  # the others need a store
    }
    machine = describe_machine()
    with checked_out(options.base, options.keep) as base:
        commits = {"base": commit_of(base), "now": commit_of(ROOT)}
        print(f"{commits['now']} (now) next to {commits['base']} (base)\n", flush=True)
        times = [
            measure_in_turns((base, ROOT), options.folder, parts, number % 2, tiny=options.tiny)
            for number in range(TIMES)
        ]
    both = [name for name in times[0][1] if name in times[0][0]]
    of_base, of_now = ([time[which] for time in times] for which in (0, 1))
    verdicts = [
        judge(name, [time[name] for time in of_base], [time[name] for time in of_now])
        for name in both
    ]
    print_table(verdicts)
    slower = [verdict for verdict in verdicts if verdict.is_slower]
    print(f"\n{len(verdicts)} figures compared, {len(slower)} slower")
    if options.json:
        result = {"machine": machine, **commits, "parts": parts, "times": TIMES}
        rows = [asdict(verdict) for verdict in verdicts]
        options.json.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
