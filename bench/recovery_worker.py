"""A worker of the jobs that ``recovery_time.py`` kills: ours, and one that restarts the usual way.

Journals its steps and what lies between a loss and the next step, one JSON line each. Each way
imports what it needs itself, as its start-up counts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

STARTED = time.time()  # before torch is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cpr_ext.state.table import find_tables  # noqa: E402
from cpr_ext.wings.lab.dlrm import row_sharded  # noqa: E402
from cpr_ext.wings.lab.dlrm.batch import Batch, Hyperparameters  # noqa: E402
from cpr_ext.wings.lab.dlrm.model import DLRM  # noqa: E402
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers  # noqa: E402

NUM_TABLES, DIM, NUM_DENSE, NUM_BATCHES = 4, 16, 13, 16


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, event: str, step: int, at: float | None = None) -> None:
        line = {"event": event, "step": step, "pid": os.getpid(), "time": at or time.time()}
        self._file.write(json.dumps(line) + "\n")


class Training:
    """The model of one worker and its steps; the same for both ways."""

    def __init__(self, table_bytes: int, batch_size: int) -> None:
        self._table_bytes = table_bytes
        self._batch_size = batch_size
        self._batches: list[Batch] = []

    def build(self, group: Any) -> tuple[DLRM, tuple[torch.optim.Optimizer, ...]]:
        """Return the model, its rows without values, and its optimizers."""
        rows = self._table_bytes // (4 * DIM * NUM_TABLES * group.size())
        names = [f"table{number}" for number in range(NUM_TABLES)]
        model = DLRM(
            table_names=names,
            num_embeddings=[1] * NUM_TABLES,
            embedding_dim=DIM,
            num_dense=NUM_DENSE,
            bottom_mlp=(64, DIM),
            top_mlp=(64, 1),
        )
        for name in names:
            weight = torch.empty(rows, DIM)
            bag = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=weight)
            model.tables[name] = row_sharded.RowShard(bag, rows * group.rank(), group)
        self._batches = [self._batch(number, rows * group.size()) for number in range(NUM_BATCHES)]
        return model, build_optimizers(model, Hyperparameters())

    @staticmethod
    def initialize(model: nn.Module) -> None:
        """Give the rows their first values."""
        with torch.no_grad():
            for shard in model.tables.values():  # type: ignore[operator, union-attr]
                weight = shard.rows.weight
                weight.uniform_(-(len(weight) ** -0.5), len(weight) ** -0.5)

    def _batch(self, seed: int, rows: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def rand(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator)

        offsets = torch.arange(self._batch_size)
        skewed = [(rand(self._batch_size) ** 4 * rows).long() for _ in range(NUM_TABLES)]
        labels = (rand(self._batch_size) < 0.3).float()
        return Batch(rand(self._batch_size, NUM_DENSE), skewed, [offsets] * NUM_TABLES, labels)

    def step(self, model: DLRM, optimizers: Any, group: Any, number: int) -> int:
        part = row_sharded.own_part(self._batches[number % NUM_BATCHES], group)
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(part)
        loss = functional.binary_cross_entropy_with_logits(logits, part.labels, reduction="sum")
        (loss / self._batch_size).backward()
        row_sharded.sum_gradients(optimizers[1].param_groups[0]["params"], group)
        for optimizer in optimizers:
            optimizer.step()
        return self._batch_size


def run_live(settings: dict[str, Any], folder: Path) -> None:
    """Workers that outlive each other."""
    import cpr_ext
    from cpr_ext.distributed import Event, Job, Parity, Worker

    options: dict[str, Any] = {}
    if settings["group_size"] is not None:
        rate = settings["rebuild_bytes_per_second"]
        parity = Parity(group_size=settings["group_size"], rebuild_bytes_per_second=rate)
        options = {"recovery": "exact", "parity": parity}
    worker = Worker.from_environment(
        folder / "stores", observe=lambda event: observe(event), **options
    )
    training = Training(settings["table_bytes"], settings["batch_size"])
    journal = Journal(folder / f"journal-{worker.identity.rank}")
    # A spare has done its imports before: here begins what is left of its start-up.
    journal.write("started", 0, time.time() if settings["spares"] else STARTED)

    def observe(event: Event) -> None:
        journal.write(event.kind, event.step, event.unix_seconds)

    def make_checkpointer(model: Any, optimizers: Any, directory: Path) -> cpr_ext.Checkpointer:
        schedule = cpr_ext.EverySteps(settings["every_steps"])
        checkpointer = cpr_ext.Checkpointer(model, optimizers, directory, schedule=schedule)
        journal.write("ready", 0)
        return checkpointer

    was_protected = False

    def train_step(job: Job, number: int) -> int:
        nonlocal was_protected
        parity = job.checkpointer.metrics.parity
        if parity is not None and parity.protected != was_protected:
            was_protected = parity.protected
            journal.write("protected" if was_protected else "unprotected", number)
        return training.step(job.model, job.optimizers, job.group, number)

    worker.run(
        training.build,
        train_step,
        num_steps=settings["num_steps"],
        make_checkpointer=make_checkpointer,
        initialize=training.initialize,
    )


def run_usual(settings: dict[str, Any], folder: Path) -> None:
    """All processes restart and load a checkpoint of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    journal = Journal(folder / f"journal-{dist.get_rank()}")
    journal.write("started", 0, STARTED)
    training = Training(settings["table_bytes"], settings["batch_size"])
    model, optimizers = training.build(group)
    training.initialize(model)
    journal.write("ready", 0)
    checkpoints, every = folder / "checkpoints", settings["checkpoint_every_steps"]
    saved = [int(path.parent.name) for path in checkpoints.glob("*/.metadata")]
    if begin := max(saved, default=0):
        dcp.load(state_of(model, optimizers), checkpoint_id=checkpoints / str(begin))
        journal.write("recovered", begin)
    for step in range(begin + 1, settings["num_steps"] + 1):
        training.step(model, optimizers, group, step - 1)
        if step % every == 0:
            dcp.save(state_of(model, optimizers), checkpoint_id=checkpoints / str(step))
            if dist.get_rank() == 0:
                shutil.rmtree(checkpoints / str(step - every), ignore_errors=True)
        journal.write("step", step)
    dist.destroy_process_group()


def state_of(model: DLRM, optimizers: Any) -> dict[str, Any]:
    """Views of this worker's rows and, the same for all, of the dense part."""
    rank = dist.get_rank()
    tables = find_tables(model, optimizers)
    table_ids = {id(table.weight) for table in tables}
    state: dict[str, Any] = {
        f"rank{rank}.{table.name}.{name}": values
        for table in tables
        for name, values in table.arrays().items()
    }
    for name, values in model.state_dict(keep_vars=True).items():
        if id(values) not in table_ids:
            state[f"dense.{name}"] = values.detach()
    for number, parameter in enumerate(optimizers[1].param_groups[0]["params"]):
        state[f"dense.sum.{number}"] = optimizers[1].state[parameter]["sum"]
    return state


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"live": run_live, "usual": run_usual}[sys.argv[1]](json.loads(sys.argv[2]), Path(sys.argv[3]))
