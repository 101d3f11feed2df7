"""A worker of the jobs that ``parity_overhead.py`` compares: with parity, and without.

Trains in turns: at the end of each it waits until the benchmark lets it train the next. Journals
what each turn took, one JSON line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import cpr_ext
from cpr_ext.distributed import Job, Parity, Worker
from cpr_ext.wings.lab.dlrm import row_sharded
from cpr_ext.wings.lab.dlrm.batch import Batch, Hyperparameters
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import find_preset

_POLL_SECONDS = 0.002


class Turns:
    """Waits between turns, and says what each took."""

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._journal = (folder / f"journal-{rank}").open("a", buffering=1)

    def wait(self, step: int) -> None:
        """Return when ``step`` may be trained."""
        if step % self._steps:
            return
        line = {"step": step, "time": time.time(), **used()}
        self._journal.write(json.dumps(line) + "\n")
        while int((self._folder / "allowed").read_text() or 0) <= step:
            time.sleep(_POLL_SECONDS)


def used() -> dict[str, float]:
    """Seconds of the processor by thread, and bytes of memory, of this process until now."""
    parity = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("cpr_ext-parity") and thread.ident is not None:
            parity += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    status = Path("/proc/self/status").read_text()
    [memory] = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return {
        "training_cpu": time.thread_time(),
        "parity_cpu": parity,
        "process_cpu": time.process_time(),
        "memory_bytes": int(memory.split()[1]) << 10,
    }


def sizes_of(preset_name: str, workers: int) -> list[int]:
    """Rows of each table, so many that each worker has as many as the others."""
    rows = find_preset(preset_name).synthetic_num_embeddings
    return [workers * -(-count // workers) for count in rows]


def build_model(settings: dict[str, Any], rows: list[int]) -> DLRM:
    """Return the model with so many rows in each table."""
    preset = find_preset(settings["preset"])
    return DLRM(
        table_names=[f"table_{number}" for number in range(len(rows))],
        num_embeddings=rows,
        embedding_dim=preset.embedding_dim,
        num_dense=settings["num_dense"],
        bottom_mlp=preset.bottom_mlp[1:],
        top_mlp=preset.top_mlp,
    )


def build(settings: dict[str, Any], group: Any) -> tuple[DLRM, tuple[torch.optim.Optimizer, ...]]:
    rows = [count // group.size() for count in sizes_of(settings["preset"], group.size())]
    model = build_model(settings, rows)
    for name, count in zip(list(model.tables), rows, strict=True):
        shard = row_sharded.RowShard(model.tables[name], count * group.rank(), group)
        model.tables[name] = shard
    return model, build_optimizers(model, Hyperparameters())


def main() -> None:
    settings, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    is_protected = settings["way"] == "parity"
    parity = Parity(group_size=settings["group_size"]) if is_protected else None
    worker = Worker.from_environment(
        folder / "stores",
        recovery="exact" if is_protected else "partial",
        parity=parity,
        check_every_steps=None,
    )
    turns = Turns(folder, worker.identity.rank, settings["turn_steps"])
    batches = [Batch(*parts) for parts in torch.load(settings["batches"], weights_only=True)]

    def make_checkpointer(model: Any, optimizers: Any, directory: Path) -> cpr_ext.Checkpointer:
        never = cpr_ext.EverySteps(settings["num_steps"] + 1)
        return cpr_ext.Checkpointer(model, optimizers, directory, schedule=never)

    def train_step(job: Job, number: int) -> int:
        turns.wait(number)
        batch = batches[number % len(batches)]
        part = row_sharded.own_part(batch, job.group)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        logits = job.model(part)
        loss = functional.binary_cross_entropy_with_logits(logits, part.labels, reduction="sum")
        (loss / batch.batch_size).backward()
        row_sharded.sum_gradients(job.optimizers[1].param_groups[0]["params"], job.group)
        for optimizer in job.optimizers:
            optimizer.step()
        return batch.batch_size

    worker.run(
        lambda group: build(settings, group),
        train_step,
        num_steps=settings["num_steps"],
        make_checkpointer=make_checkpointer,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
