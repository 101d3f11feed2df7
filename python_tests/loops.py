"""Training loops that people have, each of which a killed process must continue bit for bit.

loops.py NAME
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cpr_ext

sys.path.append(str(Path(__file__).resolve().parents[1]))  # it runs as a script, too
from python_tests.keyed_job import SlotMap

NUM_STEPS = 14
ROWS, IDS = 40, 4000


def checkpointer(model, optimizers, **options):
    return cpr_ext.Checkpointer(
        model,
        optimizers,
        "store",
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(5, when_busy="wait"),
        **options,
    )


def build():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return nn.Sequential(nn.EmbeddingBag(ROWS, 4, sparse=True), nn.Linear(4, 1))


def batch(number, high=ROWS):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, high, (6, 3), generator=generator)


def accumulation():
    """Gradients of three batches for each step; a batch is fetched by its number."""
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    with checkpointer(model, optimizer) as ckpt:
        report = ckpt.recover()
        number = 3 * report.step
        while ckpt.step_count < NUM_STEPS:
            model(batch(number)).square().mean().backward()
            number += 1
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step(num_samples=18)


def two_optimizers():
    """SparseAdam for the table, AdamW with a schedule for the rest, clipped gradients."""
    model = build()
    tables = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
    dense = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(dense, NUM_STEPS)
    with checkpointer(model, [tables, dense], state={"schedule": schedule}) as ckpt:
        ckpt.recover()
        while ckpt.step_count < NUM_STEPS:
            loss = model(batch(ckpt.step_count)).square().mean()
            tables.zero_grad()
            dense.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model[1].parameters(), 0.1)
            tables.step()
            dense.step()
            schedule.step()
            ckpt.step(num_samples=6)


def data_parallel():
    """DistributedDataParallel, here of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        table, head = build()
        head = DistributedDataParallel(head)
        model = nn.Sequential(table, head)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
        with checkpointer(model, optimizer) as ckpt:
            ckpt.recover()
            while ckpt.step_count < NUM_STEPS:
                optimizer.zero_grad()
                model(batch(ckpt.step_count)).square().mean().backward()
                optimizer.step()
                ckpt.step(num_samples=6)
    finally:
        dist.destroy_process_group()


def id_map():
    """A table of a fixed number of rows for unbounded ids, with a map of the user's own."""
    model, ids = build(), SlotMap(ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    keys = cpr_ext.SlotKeys(ids.key, {"used": ids.used}, on_restored=ids.rebuild)
    table = cpr_ext.Table("0", model[0].weight, optimizer, [model[0]], keys=keys)
    with checkpointer(model, optimizer, tables=[table]) as ckpt:
        ckpt.recover()
        while ckpt.step_count < NUM_STEPS:
            given = batch(ckpt.step_count, IDS)
            rows, new = ids(given.flatten().tolist())
            with ckpt.writing_rows("0", new), torch.no_grad():
                model[0].weight[new] = 0.0  # a new id begins from here
            optimizer.zero_grad()
            model(rows.reshape(given.shape)).square().mean().backward()
            optimizer.step()
            ckpt.step(num_samples=6)


LOOPS = {
    loop.__name__: loop for loop in (accumulation, two_optimizers, data_parallel, id_map)
}  # fmt: skip


if __name__ == "__main__":
    LOOPS[sys.argv[1]]()
