"""Runs everything that needs a GPU, part by part, each with a time limit and a log; says how it
went.

    python tools/gpu.py [--out DIR] [--minutes N] [--python PYTHON] [--emulated] [PART ...]

Without names all parts, in their order. The native core is built first, unless --no-build. Needs
neither make nor an installed cpr_ext, and no network. Exit status 1 if a part failed or ran out of
time; one that lacks a program, a module or data has failed, and its line has the remedy. What the
parts print is in DIR/log.txt, also after an interrupt, next to at most four files of results.
--emulated runs the same on the emulated device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_machine import Machine, examine
from gpu_parts import EMULATED_PARTS, MOST_SECONDS, PARTS, Part

ROOT = Path(__file__).resolve().parents[1]
LOG = "log.txt"  # of all parts: a machine that is lent may return few files
_ALL_MINUTES = 25.0


@dataclass(frozen=True)
class Outcome:
    """How a part went: ``told`` is its last line, or why it failed."""

    name: str
    passed: bool
    seconds: float
    told: str

    def line(self) -> str:
        """As shown in the table."""
        state = "passed" if self.passed else "failed"
        return f"{self.name:<12}{state:<10}{self.seconds:>8.0f}  {self.told}"


def run_part(part: Part, machine: Machine, out: Path, seconds_left: float) -> Outcome:
    """Runs it; all that it prints goes to its log in ``out`` too."""
    if lack := machine.lacks(part.needs, part.modules, header=part.needs_header):
        with (out / LOG).open("a") as file:
            print(f"== {part.name}\n{lack}", file=file)
        return Outcome(part.name, False, 0.0, lack)
    limit = min(part.limit_seconds, seconds_left)
    if limit <= 0:
        return Outcome(part.name, False, 0.0, "no time was left for it")
    began, began_at = time.monotonic(), time.time()
    code, text = _run(part, machine, out, limit)
    seconds = time.monotonic() - began
    for name in part.keeps:
        path = ROOT / name
        if path.is_file() and path.stat().st_mtime >= began_at:
            shutil.copy(path, out / path.name)
    last = text.rstrip().rsplit("\n", 1)[-1].strip("= ")[:120]
    if code is None:
        return Outcome(part.name, False, seconds, f"killed after {limit:.0f} s: {last}")
    if code != 0:
        return Outcome(part.name, False, seconds, f"exit status {code}: {last}")
    if part.expects not in text:
        return Outcome(part.name, False, seconds, f"its output has no {part.expects!r}")
    return Outcome(part.name, True, seconds, last)


def _run(part: Part, machine: Machine, out: Path, limit: float) -> tuple[int | None, str]:
    """Exit status, None if it was killed for its time; and what it printed."""
    environment = {
        **os.environ,
        **machine.environment(),
        **part.variables,
        "PYTHON": machine.python,
        "GPU_OUT": str(out),
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "MPLBACKEND": "Agg",
    }
    log = out / LOG
    with log.open("a") as file:
        print(f"== {part.name}\n$ {part.command}", file=file, flush=True)
        begin = file.tell()
        process = subprocess.Popen(
            ["bash", "-c", part.command],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    with log.open("rb") as written:
        written.seek(begin)
        return code, written.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started and left running; they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(parts: Sequence[Part], machine: Machine, out: Path, minutes: float) -> list[Outcome]:
    """Runs the parts, tells each as it ends, and all of them in the end.

    After a build that failed, nothing is run: a core of other sources would be measured.
    """
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    try:
        for part in parts:
            if outcomes and outcomes[0].name == "build" and not outcomes[0].passed:
                outcomes.append(Outcome(part.name, False, 0.0, "not run: the build failed"))
                continue
            print(f"{part.name} ...", flush=True)
            left = deadline - time.monotonic()
            outcomes.append(run_part(part, machine, out, left))
            print(outcomes[-1].line(), flush=True)
            _keep(outcomes, machine, out)
    finally:
        print(f"\n{'part':<12}{'':<10}{'seconds':>8}")
        for outcome in outcomes:
            print(outcome.line())
        print(f"logs and results: {out}", flush=True)
    return outcomes


def _keep(outcomes: Sequence[Outcome], machine: Machine, out: Path) -> None:
    """What ran until now, on what: ``out`` may be all that is left of the machine.

    Parts of earlier calls stay, if those were of the same commit and on the same machine.
    """
    path = out / "summary.json"
    about = {**machine.about, "tools": {k: str(v) for k, v in machine.tools.items()}}
    about.pop("missing", None)  # of the modules that this call's parts need
    kept: dict[str, Any] = {"commit": _commit(), "machine": about}
    with suppress(OSError, ValueError):
        earlier = json.loads(path.read_text())
        if {name: earlier.get(name) for name in kept} == kept:
            kept["parts"] = earlier["parts"]
    names = {outcome.name for outcome in outcomes}
    others = [part for part in kept.get("parts", []) if part["name"] not in names]
    kept["parts"] = [*others, *(asdict(outcome) for outcome in outcomes)]
    path.write_text(json.dumps(kept, indent=1) + "\n")


def _commit() -> str:
    """Of the tree; in a copy without git's folder what `gpu_first_run.sh prepare` noted."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    noted = ROOT / "cpr_ext.egg-info" / "commit.txt"
    return noted.read_text().strip() if noted.is_file() else "unknown"


def _wanted(parts: Sequence[Part], names: Sequence[str], builds: bool) -> list[Part]:
    chosen = [part for part in parts if not names or part.name in names]
    build = [part for part in parts if part.name == "build"]
    others = [part for part in chosen if part.name != "build"]
    return [*(build if builds else []), *others]


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("parts", nargs="*", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--python", default=sys.executable, help="the one that has torch with CUDA")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    minutes = f"for this call (default: {MOST_SECONDS / 60:g} if parts are named, else 25)"
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--no-build", action="store_true", help="the core is built already")
    parser.add_argument("--emulated", action="store_true", help="without a GPU")
    options = parser.parse_args()
    parts = EMULATED_PARTS if options.emulated else PARTS
    known = [part.name for part in parts]
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    wanted = _wanted(parts, options.parts, not options.no_build)
    began = time.monotonic()
    machine = examine(options.python, sorted({name for part in wanted for name in part.modules}))
    if not (options.emulated or machine.has_gpu):
        print(
            f"PyTorch of {options.python} ({machine.about['torch']}) finds no GPU here; nothing "
            "was run. --emulated runs the parts without one",
            file=sys.stderr,
        )
        return 1
    minutes_left = options.minutes
    if minutes_left is None:
        minutes_left = MOST_SECONDS / 60 if options.parts else _ALL_MINUTES
    minutes_left -= (time.monotonic() - began) / 60  # torch may take a minute to load
    outcomes = run_all(wanted, machine, options.out.resolve(), minutes_left)
    return int(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
