"""What is left of a checkpoint when things go wrong: ours and what one could use instead.

    python bench/reliability.py [--tries 50] [--tiny] [--only NAME]

Three experiments, each try in processes of its own, on the same machine and disk:

- **kill while saving**: a process saves again and again; SIGKILL at a random moment of a save. What
  does a fresh process load?
- **bit flip**: one random bit of the files of a finished save is flipped. Is it noticed?
- **torn capture**: an asynchronous save has returned and training changes the tensors at once. Are
  the values on disk those of the moment of the call?

Keeps bench/results/reliability.json and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import savers
import torch
from savers import Saver, State, fill, make_state
from tqdm import tqdm

from cpr_ext.wings.lab.emulation.machine import describe_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "reliability.json"
PAGE = HERE.parent / "docs" / "reliability.md"
MARKS = ("<!-- results: written by bench/reliability.py -->", "<!-- end of results -->")
SEED = 20261121

# What a try may end in, by experiment: outcome -> what it means. The first ones are good.
KILL = {
    "kept": "loads; as new as the last save that was reported as finished, or newer",
    "older": "loads, but a save that was reported as finished is gone",
    "nothing": "nothing loads",
    "mixed": "loads without an error, as a mixture of two saves",
}
FLIP = {
    "detected": "an error or a report names it",
    "harmless": "every value equals the saved one",
    "silent": "wrong values load without an error",
}
TORN = {
    "exact": "every value is the one at the time of the call",
    "torn": "it contains values of later steps",
    "error": "the save failed",
}
MakeSaver = Callable[[Path, State], Saver]


def contenders(experiment: str) -> dict[str, MakeSaver]:
    """Name -> how to make it.

    Killed, peers come twice: with one path for all saves, and with a path for each.
    """
    async_only = experiment == "torn capture"
    ours = [peer for peer in (savers.CprExtSync, savers.CprExt) if peer.is_async or not async_only]
    if experiment == "bit flip":
        ours = [savers.CprExt]
    found: dict[str, MakeSaver] = {saver.name: saver for saver in ours}
    for peer in savers.PEERS:
        if async_only and not peer.is_async:
            continue
        if experiment != "kill while saving":
            found[peer.name] = partial(peer, new_paths=False)
            continue
        for form, new_paths in (("one path", False), ("a path per save", True)):
            found[f"{peer.name}, {form}"] = partial(peer, new_paths=new_paths)
    return found


# --- processes ---


def in_child(action: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child runs action(pipe to write to) and ends. Returns its pid and the other end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            action(writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    return pid, reader


def result_of(action: Callable[[], Any]) -> Any:
    """What action() returns, run in a child; {"error": text} if it raised or died."""

    def run(pipe: int) -> None:
        try:
            text = json.dumps(action())
        except BaseException as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
        os.write(pipe, text.encode())

    pid, reader = in_child(run)
    with os.fdopen(reader, "rb") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def load(make: MakeSaver, folder: Path, num_rows: int) -> dict[str, Any]:
    """What a fresh process finds: {"step", "uniform"} or {"error"}."""

    def action() -> dict[str, Any]:
        saver = make(folder, make_state(num_rows))
        step = saver.load()
        values = list(saver.state.values())
        return {"step": step, "uniform": all(bool((value == step).all()) for value in values)}

    return result_of(action)


# --- the experiments ---


def kill_while_saving(make: MakeSaver, folder: Path, num_rows: int, chance: random.Random) -> str:
    def save_forever(pipe: int) -> None:
        state = make_state(num_rows)
        saver = make(folder, state)
        step = 0
        while True:
            step += 1
            fill(state, step)
            wait = saver.begin(step)
            if saver.is_async:
                fill(state, step + 1000)  # training goes on; the next fill sets it right
            wait()
            os.write(pipe, step.to_bytes(8, "little"))

    pid, reader = in_child(save_forever)
    acknowledged, moments = 0, []
    for _ in range(chance.randint(2, 5)):
        message = os.read(reader, 8)
        if len(message) < 8:
            raise RuntimeError("the saver ended by itself")
        acknowledged = int.from_bytes(message, "little")
        moments.append(time.monotonic())
    time.sleep(chance.uniform(0, 1.5) * (moments[-1] - moments[-2]))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while message := os.read(reader, 8):
        acknowledged = int.from_bytes(message, "little")
    os.close(reader)
    found = load(make, folder, num_rows)
    if "error" in found:
        return "nothing"
    if not found["uniform"]:
        return "mixed"
    return "kept" if found["step"] >= acknowledged else "older"


def flip_a_bit(make: MakeSaver, folder: Path, num_rows: int, chance: random.Random) -> str:
    def save_once() -> list[str]:
        state = make_state(num_rows)
        saver = make(folder, state)
        fill(state, 1)
        saver.begin(1)()
        return [str(path) for path in saver.files()]

    files = result_of(save_once)
    if isinstance(files, dict):
        raise RuntimeError(files["error"])
    sizes = [Path(path).stat().st_size for path in files]
    path = Path(chance.choices(files, sizes)[0])
    with path.open("r+b") as file:
        offset = chance.randrange(path.stat().st_size)
        file.seek(offset)
        byte = file.read(1)[0] ^ (1 << chance.randrange(8))
        file.seek(offset)
        file.write(bytes([byte]))
    found = load(make, folder, num_rows)
    if "error" in found:
        return "detected"
    return "harmless" if found == {"step": 1, "uniform": True} else "silent"


def tear_capture(make: MakeSaver, folder: Path, num_rows: int, chance: random.Random) -> str:
    def save_and_train() -> str:
        state = make_state(num_rows)
        saver = make(folder, state)
        fill(state, 1)
        saver.begin(1)()
        fill(state, 2)
        wait = saver.begin(2)
        for later in range(chance.randint(1, 8)):
            fill(state, 3 + later)
        wait()
        return "saved"

    if result_of(save_and_train) != "saved":
        return "error"
    found = load(make, folder, num_rows)
    if "error" in found:
        return "error"
    return "exact" if found == {"step": 2, "uniform": True} else "torn"


EXPERIMENTS: dict[str, tuple[Callable[..., str], dict[str, str]]] = {
    "kill while saving": (kill_while_saving, KILL),
    "bit flip": (flip_a_bit, FLIP),
    "torn capture": (tear_capture, TORN),
}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    num_rows = 2_000 if options.tiny else 131_072
    todo = [
        (experiment, name, make)
        for experiment in EXPERIMENTS
        for name, make in contenders(experiment).items()
        if options.only in name
    ]
    rows = []
    with tempfile.TemporaryDirectory(prefix="cpr_bench.", dir=options.folder) as base:
        progress = tqdm(todo, unit="row", disable=None)
        for experiment, name, make in progress:
            progress.set_postfix_str(f"{experiment}: {name}")
            run, outcomes = EXPERIMENTS[experiment]
            chance = random.Random(f"{SEED} {experiment} {name}")
            counts: Counter[str] = Counter()
            for attempt in range(options.tries):
                folder = Path(base) / f"try-{attempt}"
                folder.mkdir()
                counts[run(make, folder, num_rows, chance)] += 1
                shutil.rmtree(folder)
            rows.append(
                {
                    "experiment": experiment,
                    "saver": name,
                    "tries": options.tries,
                    "outcomes": {outcome: counts[outcome] for outcome in outcomes},
                }
            )
    return rows


# --- what a person reads ---


def table(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown, one table per experiment."""
    lines = []
    for experiment, (_, outcomes) in EXPERIMENTS.items():
        lines += [f"### {experiment.capitalize()}", ""]
        lines += [f"- *{outcome}*: {meaning}" for outcome, meaning in outcomes.items()]
        lines += ["", f"| saver | {' | '.join(outcomes)} |", f"|---|{'---:|' * len(outcomes)}"]
        for row in rows:
            if row["experiment"] == experiment:
                counts = (str(row["outcomes"][outcome]) for outcome in outcomes)
                lines.append(f"| {row['saver']} | {' | '.join(counts)} |")
        lines.append("")
    return "\n".join(lines)


def keep(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    from importlib.metadata import version

    machine = describe_machine()
    versions = {name: version(name) for name in ("torch", "safetensors", "torchsnapshot")}
    RESULTS.write_text(
        json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n"
    )
    page = PAGE.read_text()
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    libraries = ", ".join(f"{name} {number}" for name, number in versions.items())
    head = (
        f"{options.tries} tries each, {machine['date'][:10]}, commit {machine['commit']}, "
        f"{machine['cores']} cores ({machine['cpu']}), {libraries}."
    )
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{head}\n\n{table(rows)}\n{MARKS[1]}{after}")
    print(f"kept in {RESULTS.relative_to(HERE.parent)} and {PAGE.relative_to(HERE.parent)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=50, help="of each experiment and saver")
    parser.add_argument("--tiny", action="store_true", help="small state, 2 tries, nothing is kept")
    parser.add_argument("--only", default="", help="savers whose name holds this; nothing is kept")
    parser.add_argument("--folder", help="where to save (default: the temporary folder)")
    options = parser.parse_args()
    if options.tiny:
        options.tries = min(options.tries, 2)
    torch.set_num_threads(1)  # no threads before the forks
    for module in savers.MODULES:  # imported once, not in every child
        importlib.import_module(module)
    rows = run_all(options)
    print(table(rows))
    if not (options.tiny or options.only):
        keep(rows, options)


if __name__ == "__main__":
    sys.exit(main())
