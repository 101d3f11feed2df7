"""Runs everything that needs a GPU, each part with a time limit and a log, and says how it went.

    python tools/gpu.py [--python PYTHON] [--logs DIR] [--minutes 25] [PART ...]

Without names all parts, in their order. Exit status 1 if one failed or ran out of time. A part that
this machine has no tool for is skipped. Interrupted, it still says what was done.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HAS_GPU = "import torch; raise SystemExit(not torch.cuda.is_available())"


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        command: PYTHON stands for the interpreter.
        limit_seconds: then it is killed, with all that it started.
        needs: a program that it cannot do without.
        expects: what its output must hold; "" for nothing.
    """

    name: str
    command: str
    limit_seconds: float
    needs: str = ""
    expects: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def _sanitizer(tool: str, expects: str) -> Part:
    tests = "-m pytest python_tests/csrc -k cuda -q -rs -p no:cacheprovider -o timeout=480"
    return Part(
        tool,
        f"compute-sanitizer --tool {tool} --error-exitcode 9 PYTHON {tests}",
        420,
        needs="compute-sanitizer",
        expects=expects,
        variables={"CPR_EXT_HYPOTHESIS": "sanitize"},
    )


PARTS = (
    Part("build", "make build-gpu GPU_PYTHON=PYTHON", 420, needs="nvcc"),
    Part(
        "test",
        "PYTHON -m pytest -q -rs python_tests/csrc python_tests/test_gpu.py -k 'cuda or gpu'",
        400,
        expects=" passed",
    ),
    Part("bench", "PYTHON bench/gpu_targets.py", 480, needs="nvcc"),
    Part("profile", "PYTHON bench/gpu_profile.py --trace build/gpu/trace.json", 150),
    Part(
        "train",  # MovieTweetings; killed by SIGKILL; from one device to another
        "PYTHON -m pytest -q -rs python_tests/cli/test_train.py python_tests/dlrm/test_trainer.py"
        " -k 'cuda or gpu'",
        300,
        expects=" passed",
    ),
    _sanitizer("memcheck", "ERROR SUMMARY: 0 errors"),
    _sanitizer("racecheck", "RACECHECK SUMMARY: 0 hazards displayed"),
)


@dataclass(frozen=True)
class Outcome:
    """How a part went: ``state`` is passed, failed or skipped, ``told`` its last line or why."""

    name: str
    state: str
    seconds: float
    told: str


def run_part(part: Part, python: str, log: Path, seconds_left: float) -> Outcome:
    """Runs it; all that it prints goes to ``log`` too."""
    if part.needs and shutil.which(part.needs) is None:
        return Outcome(part.name, "skipped", 0.0, f"{part.needs} is not on the PATH")
    limit = min(part.limit_seconds, seconds_left)
    if limit <= 0:
        return Outcome(part.name, "failed", 0.0, "no time was left for it")
    began = time.monotonic()
    command = part.command.replace("PYTHON", shlex.quote(python))
    with log.open("w") as file:
        print(f"$ {command}", file=file, flush=True)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, **part.variables, "PYTHONUNBUFFERED": "1", "MPLBACKEND": "Agg"},
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
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    last = text.rstrip().rsplit("\n", 1)[-1].strip("= ")
    if code is None:
        return Outcome(part.name, "failed", seconds, f"killed after {limit:.0f} s: {last}")
    if code != 0:
        return Outcome(part.name, "failed", seconds, f"exit status {code}: {last}")
    if part.expects not in text:
        return Outcome(part.name, "failed", seconds, f"its output has no {part.expects!r}")
    return Outcome(part.name, "passed", seconds, last)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started and left running; they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(parts: Iterable[Part], python: str, logs: Path, minutes: float) -> list[Outcome]:
    """Runs the parts, tells each as it ends, and all of them in the end."""
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    try:
        for part in parts:
            print(f"{part.name} ...", flush=True)
            left = deadline - time.monotonic()
            outcomes.append(run_part(part, python, logs / f"{part.name}.log", left))
            print(_line(outcomes[-1]), flush=True)
    finally:
        print(f"\n{'part':<12}{'':<10}{'seconds':>8}")
        for outcome in outcomes:
            print(_line(outcome))
        print(f"logs: {logs}", flush=True)
    return outcomes


def _line(outcome: Outcome) -> str:
    return f"{outcome.name:<12}{outcome.state:<10}{outcome.seconds:>8.0f}  {outcome.told[:120]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--python", default=sys.executable, help="the one that has torch with CUDA")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    options = parser.parse_args()
    known = [part.name for part in PARTS]
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(known)}")
    if subprocess.run([options.python, "-c", HAS_GPU]).returncode != 0:
        print(f"PyTorch of {options.python} finds no GPU here; nothing was run", file=sys.stderr)
        return 1
    wanted = [part for part in PARTS if not options.parts or part.name in options.parts]
    outcomes = run_all(wanted, options.python, options.logs, options.minutes)
    return int(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
