"""Every reader beside a writer that commits and retains as fast as it can.

python -m python_tests.faults.readers --rounds 1000

Every row and the dense part of the writer's model hold the step's number, negated, so that what a
reader returns shows by itself whether it is one committed state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import cpr_ext
from cpr_ext import Retention, StoreOptions
from cpr_ext.storage import locks
from cpr_ext.storage.manifest import read_manifest
from cpr_ext.wings.tools.maintenance import export, inspect, read_rows, verify
from python_tests.helpers import open_checkpointer

NUM_ROWS, DIM = 60, 3


class StepModel(nn.Module):
    """Each step takes 1 from every row and from the one dense parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, DIM, sparse=True)
        self.dense = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.table.weight)


def open_run(directory: Path, **options: Any) -> tuple[StepModel, list[Any], cpr_ext.Checkpointer]:
    """A model with its optimizers and a checkpointer."""
    model = StepModel()
    optimizers = [
        torch.optim.SGD(model.table.parameters(), lr=1.0),
        torch.optim.SGD([model.dense], lr=1.0),
    ]
    checkpointer = open_checkpointer(
        model,
        optimizers,
        directory,
        num_shards=2,
        priority=cpr_ext.AllRows(),
        staging=cpr_ext.StagingOptions(direct_io=False, num_threads=1),
        save_at_close=False,
        **options,
    )
    return model, optimizers, checkpointer


def write(store: Path, wait_seconds: float, stop: Any) -> None:
    """Train and save at every step until told to stop."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    locks.WAIT_SECONDS = wait_seconds
    model, optimizers, checkpointer = open_run(
        store,
        schedule=cpr_ext.EverySteps(1),
        store=StoreOptions(rebase_after=3.0, retention=Retention(full_recovery_points=1)),
    )
    while not stop.is_set():
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model.table(torch.arange(NUM_ROWS)).sum() + model.dense.sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
        checkpointer.step(10)
    checkpointer.close()


@contextmanager
def writer(store: Path, wait_seconds: float) -> Iterator[None]:
    """A writer in a process of its own, once its first snapshots are there."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=write, args=(store, wait_seconds, stop), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + 60
        while (manifest := read_manifest(store)) is None or not manifest.dense:
            assert process.is_alive(), "the writer died"
            assert time.monotonic() < deadline, "the writer saves nothing"
            time.sleep(0.02)
        yield
        assert process.is_alive(), "the writer died"
    finally:
        stop.set()
        process.join(60)
        process.kill()
    assert process.exitcode == 0


def _one_value(*tensors: torch.Tensor) -> int:
    """The step that all elements tell."""
    values = torch.cat([tensor.reshape(-1) for tensor in tensors]).unique().tolist()
    assert len(values) == 1, f"a mixture of {values}"
    return -int(values[0])


def _export(store: Path, place: Path) -> None:
    out = place / "out"
    report = export(store, out)
    model = load_file(out / "model.safetensors")
    shutil.rmtree(out)
    assert _one_value(model["table.weight"], model["dense"]) == report.step


def _read_rows(store: Path, _: Path) -> None:
    rows = read_rows(store, "table", range(NUM_ROWS))
    step = _one_value(rows.arrays["weight"])
    assert rows.steps.unique().tolist() == [step]


def _move(store: Path, place: Path) -> None:
    model, _, checkpointer = open_run(place / "new")
    try:
        report = checkpointer.recover(from_store=store)
        assert report.damaged_segments == [], report.damaged_segments
        assert _one_value(model.table.weight.detach(), model.dense.detach()) == report.step
    finally:
        checkpointer.close()
        shutil.rmtree(place / "new")


def _inspect(store: Path, _: Path) -> None:
    summary = inspect(store)
    assert summary.rows.base_step >= 0
    rows = read_rows(store, "table", range(NUM_ROWS))
    assert len(rows.steps.unique()) == 1


def _verify(store: Path, _: Path) -> None:
    report = verify(store)
    assert report.is_sound, report.damaged


READERS: dict[str, Callable[[Path, Path], None]] = {
    "export": _export,
    "read_rows": _read_rows,
    "from_store": _move,
    "inspect": _inspect,
    "verify": _verify,
}


def campaign(rounds: int, wait_seconds: float) -> dict[str, list[str]]:
    """What each reader found wrong in so many rounds.

    Args:
        wait_seconds: for how long the writer's removals wait for readers.
    """
    found: dict[str, list[str]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory(prefix="cpr-readers-") as directory:
        place = Path(directory)
        with writer(place / "store", wait_seconds):
            for _ in range(rounds):
                for name, read in READERS.items():
                    try:
                        read(place / "store", place)
                    except Exception as error:
                        found[name].append(f"{type(error).__name__}: {error}")
    return found


def main() -> int:
    """Print the counts; 1 if a reader raised or returned what was never committed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=locks.WAIT_SECONDS, help="seconds")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.monotonic()
    found = campaign(options.rounds, options.wait)
    for name, errors in found.items():
        print(f"{name:12} {options.rounds} rounds, {len(errors)} wrong   {errors[:1]}")
    print(f"{time.monotonic() - started:.0f} s, removals wait {options.wait} s for readers")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
