"""Proves that a loop resumes bit for bit: trains it, and trains it again with kills, in small."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpr_ext.errors import UsageError
from cpr_ext.wings.proving.fingerprint import GENERATOR
from cpr_ext.wings.proving.judgement import Difference, Record, first_difference
from cpr_ext.wings.proving.plan import LifePlan
from cpr_ext.wings.proving.proof import Proof

LIFE = Path(__file__).with_name("life.py")
_LINES = 15  # of a process that failed


def prove(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    steps: int = 6,
    directory: str | os.PathLike[str] | None = None,
    ignore: Sequence[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Prove that a training script resumes in every bit after a kill.

    The script runs as it is, in a process of its own, up to ``steps`` calls of ``step()``. Then it
    runs again: the process is killed after a step, and a new one recovers and trains one step more,
    until all are done. At each recovery and after each step, all state must equal that of the run
    without a kill, variables of the loop included. See ``docs/prove.md``.

    Args:
        steps: to train in all.
        directory: where stores and fingerprints are meanwhile; None: where temporary files are.
        ignore: parts of names of variables that may differ.
        report: called with a line before each process.

    Returns:
        What is proven, and what is not; print it.

    Raises:
        UsageError: the script fails, or trains nothing with a Checkpointer.
    """
    name = os.fspath(script)
    with tempfile.TemporaryDirectory(prefix="cpr-prove-", dir=directory) as folder:
        plan = LifePlan(folder, require_steps(steps), script=name, arguments=tuple(arguments))
        return run_lives(name, plan, run_process, ignore, report)


def require_steps(steps: int) -> int:
    """Return steps, if a proof can be made with so many."""
    if steps < 2:
        raise UsageError(
            f"steps is {steps}; a proof needs at least 2: one before a kill, one after"
        )
    return steps


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit status, negative after a signal.
        output: what it printed.
    """

    code: int
    output: str


Run = Callable[[LifePlan, Path], Ended]


def run_process(plan: LifePlan, file: Path) -> Ended:
    """Run one life in a new process."""
    done = subprocess.run(
        [sys.executable, str(LIFE), str(file)],
        env={**os.environ, **environment_of(plan)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ended(done.returncode, done.stdout)


def environment_of(plan: LifePlan) -> dict[str, str]:
    """Return variables with which a new process finds this package, and orders sets by the seed."""
    package = str(Path(__file__).resolve().parents[3])
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join([*path, package]),
        "PYTHONHASHSEED": str(plan.seed),
    }


def run_lives(
    program: str,
    plan: LifePlan,
    run: Run,
    ignore: Sequence[str] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Run the program undisturbed, then with kills, and compare.

    Args:
        run: runs the processes of one life, and returns how the last ended.
    """
    root = Path(plan.directory)
    report(f"training {plan.steps} steps without a kill")
    whole_folder, killed_folder = root / "whole", root / "killed"
    whole_folder.mkdir()
    killed_folder.mkdir()
    ended = _live(replace(plan, directory=str(whole_folder)), run)
    ranks = range(plan.world_size)
    whole = [Record.of(whole_folder, rank, 0) for rank in ranks]
    steps = min((max(record.steps, default=0) for record in whole), default=0)
    if steps < 2:
        raise UsageError(_nothing(program, whole[0], steps, ended))
    plan = replace(plan, steps=steps, directory=str(killed_folder))
    kills = list(range(1, max(2, steps - 1)))
    difference: Difference | None = None
    lives: list[list[Record]] = []
    for number, kill_after in enumerate([*kills, None]):
        what = "to the end" if kill_after is None else f"and killing it after step {kill_after}"
        report(f"training {'from the start' if number == 0 else 'on'} {what}")
        ended = _live(replace(plan, kill_after=kill_after, seed=number), run)
        lives.append([Record.of(killed_folder, rank, number) for rank in ranks])
        killed_after = 0 if number == 0 else kills[number - 1]
        for rank, record in zip(ranks, lives[-1], strict=True):
            if difference is None:
                named = rank if plan.world_size > 1 else None
                difference = first_difference(whole[rank], record, killed_after, ignore, named)
        reached = all(max(r.steps, default=0) >= (kill_after or steps) for r in lives[-1])
        if difference is not None:
            break
        if not reached:
            raise UsageError(
                f"{program} did not train on after the kill at step {killed_after}{_ending(ended)}"
            )
    return _proof(program, plan, kills, difference, whole, lives)


def _live(plan: LifePlan, run: Run) -> Ended:
    file = Path(plan.directory) / "plan.json"
    plan.write(file)
    return run(plan, file)


def _nothing(program: str, record: Record, steps: int, ended: Ended) -> str:
    if not record.notes.of("made") and not ended.code:
        return f"{program} makes no cpr_ext.Checkpointer, so there is nothing to prove"
    what = f"{program} ended after {steps} steps; a proof needs at least 2"
    return f"{what}{_ending(ended)}"


def _ending(ended: Ended) -> str:
    lines = ended.output.strip().splitlines()[-_LINES:]
    how = f"exit status {ended.code}"
    return f" ({how}):\n" + "\n".join(f"  | {line}" for line in lines) if lines else f" ({how})"


def _proof(
    program: str,
    plan: LifePlan,
    kills: Sequence[int],
    difference: Difference | None,
    whole: Sequence[Record],
    lives: Sequence[Sequence[Record]],
) -> Proof:
    notes = [record.notes for life in [whole, *lives] for record in life]
    made = whole[0].notes.of("made")
    return Proof(
        program,
        plan.steps,
        kills,
        _count(whole[0], plan.steps),
        difference,
        made[-1]["options"] if made else {},
        sorted({event["text"] for each in notes for event in each.of("warned")}),
        sorted({e["step"] for each in notes for e in each.of("killed") if not e["is_complete"]}),
        plan.world_size,
    )


def _count(record: Record, steps: int) -> Mapping[str, int]:
    """Return how many values of each kind were compared at the last step."""
    found = {"arrays of tables": 0, "generators": 0, "inputs": 0, "losses": 0, "other values": 0}
    for name in record.prints(steps, "end"):
        kind = "other values"
        for start, of in (
            ("table '", "arrays of tables"),
            ("input ", "inputs"),
            ("loss ", "losses"),
        ):
            kind = of if name.startswith(start) else kind
        found["generators" if GENERATOR in name else kind] += 1
    begun = record.prints(steps, "begin")
    return {**found, "variables": sum(name.startswith(("state ", "plain ")) for name in begun)}
