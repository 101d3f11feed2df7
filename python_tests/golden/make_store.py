"""Makes the golden store of a format version; run once, with the release that introduces it.

    python python_tests/golden/make_store.py python_tests/golden/version-1

Its partial snapshots are rounded. Next to the store it writes what must be read from it, as plain
safetensors and JSON.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import cpr_ext
from python_tests.helpers import open_checkpointer

ROWS = {"users": (120, 4), "films": (70, 3)}


def build(seed):
    """Two tables of different dtype and optimizer, and a dense layer."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "users": nn.EmbeddingBag(*ROWS["users"], mode="sum", sparse=True),
            "films": nn.Embedding(*ROWS["films"], dtype=torch.float64),
            "linear": nn.Linear(4, 2),
        }
    )
    optimizers = [
        torch.optim.Adagrad(model["users"].parameters(), lr=0.1),
        torch.optim.Adam([*model["films"].parameters(), *model["linear"].parameters()], lr=0.01),
    ]
    return model, optimizers


def open_store(model, optimizers, directory):
    """The checkpointer with the options the golden store was made with."""
    return open_checkpointer(
        model,
        optimizers,
        directory,
        num_shards=2,
        priority=cpr_ext.MostFrequentlyUsed(0.2),
        schedule=cpr_ext.EverySteps(10**9),
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
        state={"reader": lambda: {"epoch": 3, "file": "day_0", "seen": torch.arange(5)}},
        store=cpr_ext.StoreOptions(precision=cpr_ext.Precision(partial="int8")),
        save_at_close=False,
    )


def train(model, optimizers, checkpointer, steps):
    """Steps whose lookups are drawn from the global generator."""
    for _ in range(steps):
        users = torch.randint(0, 120, (4, 3))
        items = torch.randint(0, 70, (4,))
        loss = model["linear"](model["users"](users)).square().mean() + model["films"](items).sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        checkpointer.step(num_samples=4)


def arrays_of(checkpointer):
    """Every array of every table: ``<table>/<array>``."""
    return {
        f"{table.name}/{name}": value.clone()
        for table in checkpointer.tables
        for name, value in table.arrays().items()
    }


def dense_of(model):
    """The model's parameters that are no table."""
    return {name: value.clone() for name, value in model["linear"].state_dict().items()}


def main(directory: Path) -> None:
    """Make the store: a base and two partial snapshots of two shards; a full-recovery point."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model, optimizers = build(1)
    with open_store(model, optimizers, directory / "store") as ckpt:
        train(model, optimizers, ckpt, 1)
        ckpt.wait()
        for _ in range(2):
            train(model, optimizers, ckpt, 3)
            ckpt.save()
            ckpt.wait()
    for lock in (directory / "store").rglob("LOCK"):
        lock.unlink()
    # What was saved is not all that was trained: read back what a recovery gives, by this release.
    again, again_optimizers = build(2)
    with open_store(again, again_optimizers, directory / "store") as ckpt:
        report = ckpt.recover()
        save_file(arrays_of(ckpt), directory / "rows.safetensors")
        save_file(dense_of(again), directory / "dense.safetensors")
        next_draw = torch.rand(3).tolist()
    for lock in (directory / "store").rglob("LOCK"):
        lock.unlink()
    expected = {"step": report.step, "num_samples": report.num_samples, "next_draw": next_draw}
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
