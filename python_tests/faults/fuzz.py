"""Put stores from a stranger through everything that reads a store, for minutes: make fuzz.

    python -m python_tests.faults.fuzz --seconds 600 --seed 1
    python -m python_tests.faults.fuzz --replay build/fuzz/finding-0.json

A child process tries cases, under a memory limit and with an alarm for each; this one watches it,
so that a crash, a hang and an exit are findings as well, and the child is started anew. A case is
found to be at fault if something else than an error of this library's comes out, if memory grows
by more than twice the store's bytes and 64 MB, if it takes too long, or if it touches what lies
outside.
Cases with an outcome not seen before are kept beside the findings; --keep adds them to the corpus.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from python_tests.faults.damage_scene import Scene
from python_tests.faults.hostile import draw_case, try_case
from python_tests.faults.hostile_operations import size_bytes
from python_tests.faults.memory_meter import MOST_BYTES, MemoryMeter, allowed_bytes

CORPUS = Path(__file__).parent / "corpus"
CASE_SECONDS = 30
UNDER_SANITIZER = bool(os.environ.get("CPR_EXT_SANITIZER"))


class CaseTimeoutError(Exception):
    """A case took longer than CASE_SECONDS."""


def limit_memory() -> None:
    """No more addresses than MOST_BYTES above what the process has now.

    A sanitizer reserves terabytes of addresses; there its own limit on allocations stands in.
    """
    if not UNDER_SANITIZER:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def run_child(seed: str, seconds: float, journal: Path, known: set[str]) -> None:
    """Try cases until the time is over; what happens goes into the journal, line by line."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")

    def ring(*_: object) -> None:
        raise CaseTimeoutError(f"more than {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, ring)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place, journal.open("a") as out:
        scene = Scene(Path(place) / "scene")
        try_case(scene, [], Path(place) / "store")  # imports and pools are made before the limit
        limit_memory()
        meter = MemoryMeter()
        number = 0
        while time.monotonic() < end:
            draw = random.Random(f"{seed}-{number}")
            number += 1
            case = draw_case(scene, draw)
            print(json.dumps({"begin": case}), file=out, flush=True)
            allowed = allowed_bytes(size_bytes(scene, case, Path(place) / "store"))
            signal.alarm(CASE_SECONDS)
            meter.begin()
            try:
                outcomes = try_case(scene, case, Path(place) / "store", draw)
                grown = meter.grown_bytes()
                assert grown <= allowed, f"{grown} bytes were taken, {allowed} are allowed"
            except Exception:
                fault = traceback.format_exc()
                print(json.dumps({"fault": fault, "case": case}), file=out, flush=True)
                continue
            finally:
                signal.alarm(0)
            new = sorted(set(map(" ".join, outcomes)) - known)
            known.update(new)
            done: dict[str, Any] = {"done": len(outcomes), "grown": grown}
            if new:
                done.update(case=case, new=new)
            print(json.dumps(done), file=out, flush=True)


class Watched(NamedTuple):
    """What the children told."""

    cases: int
    calls: int
    most_bytes: int  # taken by a case
    findings: list[dict]
    interesting: list[dict]  # cases with new outcomes


def watch(seed: int, seconds: float, out: Path) -> Watched:
    """Run children until the time is over."""
    end = time.monotonic() + seconds
    cases = calls = most_bytes = 0
    findings: list[dict] = []
    interesting: list[dict] = []
    known: set[str] = set()
    for life in range(10**6):
        left = end - time.monotonic()
        if left < 1:
            break
        journal = out / f"journal-{life}.jsonl"
        journal.write_text("")
        (out / "known.json").write_text(json.dumps(sorted(known)))
        command = [sys.executable, *_interpreter_flags(), "-m", "python_tests.faults.fuzz"]
        child = subprocess.Popen(
            [*command, "--child", str(journal), "--seed", f"{seed}-{life}", "--seconds", str(left)],
            stderr=subprocess.PIPE,
        )
        status = _follow(child, journal)
        error = child.stderr.read().decode(errors="replace")[-4000:] if child.stderr else ""
        begun = None
        for line in journal.read_text().splitlines():
            entry = json.loads(line)
            if "begin" in entry:
                begun, cases = entry["begin"], cases + 1
                continue
            begun = None
            calls += entry.get("done", 0)
            most_bytes = max(most_bytes, entry.get("grown", 0))
            if "fault" in entry:
                findings.append(entry)
            elif "case" in entry and set(entry["new"]) - known:
                interesting.append({"case": entry["case"], "outcomes": entry["new"]})
                known.update(entry["new"])
        if status != 0 or begun is not None:
            told = f"the process ended with {status}: {error}"
            findings.append({"fault": told, "case": begun})
        if status != 0 and begun is None:
            break  # it does not even start
    return Watched(cases, calls, most_bytes, findings, interesting)


def _interpreter_flags() -> list[str]:
    return ["-P"] if UNDER_SANITIZER else []  # the checkout's own core is not the one to test


def _follow(child: subprocess.Popen, journal: Path) -> int:
    """Wait for the end; a child whose journal stands still for long is killed."""
    size, since = -1, time.monotonic()
    while child.poll() is None:
        time.sleep(0.2)
        if (now := journal.stat().st_size) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > 4 * CASE_SECONDS:
            child.kill()
    return child.wait()


def main() -> int:
    """Print what was done; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--keep", action="store_true", help="add cases of new outcomes to corpus/")
    parser.add_argument("--replay", type=Path, help="a finding, or a case of the corpus")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        with tempfile.TemporaryDirectory() as place:
            case = json.loads(options.replay.read_text())["case"]
            for found in sorted(try_case(Scene(Path(place) / "a"), case, Path(place) / "b")):
                print(*found, sep=": ")
        return 0
    if options.child:
        known = set(json.loads((options.child.parent / "known.json").read_text()))
        run_child(options.seed, options.seconds, options.child, known)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.json*"):
        old.unlink()
    started = time.monotonic()
    told = watch(int(options.seed), options.seconds, options.out)
    for number, finding in enumerate(told.findings):
        path = options.out / f"finding-{number}.json"
        path.write_text(json.dumps(finding, indent=1))
        print(f"{path}: {finding['fault'].strip().splitlines()[-1][:200]}")
    for number, kept in enumerate(told.interesting):
        place = CORPUS if options.keep else options.out
        (place / f"fuzz-{options.seed}-{number:04d}.json").write_text(json.dumps(kept) + "\n")
    how = f"under the {os.environ['CPR_EXT_SANITIZER']} sanitizer" if UNDER_SANITIZER else ""
    print(
        f"{told.cases} hostile stores, {told.calls} calls, {len(told.findings)} findings, "
        f"{len(told.interesting)} with an outcome of their own, at most "
        f"{told.most_bytes >> 20} MiB for one; {time.monotonic() - started:.0f} s {how}"
    )
    return 1 if told.findings or not told.cases else 0


if __name__ == "__main__":
    sys.exit(main())
