"""Training loops that people have, each of which a killed process must continue bit for bit.

loops.py NAME
"""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cpr_ext

NUM_STEPS = 14
ROWS, IDS = 40, 4000


def checkpointer(model, optimizers, **options):
    return cpr_ext.Checkpointer(
        model,
        optimizers,
        "store",
        priority=cpr_ext.AllRows(),
        schedule=cpr_ext.EverySteps(5),
        consistency="step",
        when_busy="wait",
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
    with checkpointer(model, [tables, dense], stateful=[schedule]) as ckpt:
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


class IdMap:
    """Rows for ids of any size, the row of the id that was used longest ago for a new one."""

    def __init__(self):
        self.rows = OrderedDict()  # id -> row, the latest last

    def __call__(self, ids):
        """Return the rows of ids, and those that were given to a new id."""
        rows, new = [], []
        for number in ids.flatten().tolist():
            if number not in self.rows:
                full = len(self.rows) == ROWS
                self.rows[number] = self.rows.popitem(last=False)[1] if full else len(self.rows)
                new.append(self.rows[number])
            self.rows.move_to_end(number)
            rows.append(self.rows[number])
        return torch.tensor(rows).reshape(ids.shape), new

    def state_dict(self):
        return {"ids": torch.tensor([*self.rows]), "rows": torch.tensor([*self.rows.values()])}

    def load_state_dict(self, state):
        pairs = zip(state["ids"].tolist(), state["rows"].tolist(), strict=True)
        self.rows = OrderedDict(pairs)


def id_map():
    """A table of a fixed number of rows for unbounded ids, with a map of the user's own."""
    model, ids = build(), IdMap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with checkpointer(model, optimizer, stateful=[ids]) as ckpt:
        ckpt.recover()
        while ckpt.step_count < NUM_STEPS:
            rows, new = ids(batch(ckpt.step_count, IDS))
            with torch.no_grad():
                model[0].weight[new] = 0.0  # a new id begins from here
            ckpt.record_changes()
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            ckpt.step(num_samples=6)


LOOPS = {
    loop.__name__: loop for loop in (accumulation, two_optimizers, data_parallel, id_map)
}  # fmt: skip


if __name__ == "__main__":
    LOOPS[sys.argv[1]]()
