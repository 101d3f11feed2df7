"""A training script with state in many places; all is saved but what it is told to forget.

omissions.py [NAME]
"""

import sys
from collections import OrderedDict

import torch
from torch import nn

import cpr_ext

ROWS = 40


class Reader:
    """Batches one after the other, from the first on."""

    def __init__(self):
        self.next_batch = 0

    def read(self, generator):
        rows = torch.arange(self.next_batch, self.next_batch + 18).reshape(6, 3)
        self.next_batch += 1
        return (rows + torch.randint(0, ROWS, rows.shape, generator=generator)) % ROWS

    def state_dict(self):
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state):
        self.next_batch = state["next_batch"]


class Average:
    """An average of a model's weights over the last steps."""

    def __init__(self):
        self.weights = OrderedDict()

    def update(self, model):
        for name, value in model.state_dict().items():
            old = self.weights.get(name, torch.zeros_like(value))
            self.weights[name] = 0.9 * old + 0.1 * value


class Wrapper(torch.optim.Optimizer):
    """Another optimizer's steps, and no state of its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)


def train(forgotten):
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 4, sparse=True), nn.Linear(4, 1))
    teacher = nn.Linear(4, 1)
    whole = model if forgotten == "teacher" else nn.ModuleList([model, teacher])
    tables = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
    dense = torch.optim.Adam([*model[1].parameters(), *teacher.parameters()], lr=0.1)
    wrapper, average, reader = Wrapper(dense), Average(), Reader()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(dense, 0.5)
    generator = torch.Generator()
    state = {"reader": reader, "generator": generator, "scheduler": scheduler}
    state.pop(forgotten if forgotten in ("reader", "generator") else "", None)
    if forgotten != "average":
        state["average"] = lambda: dict(average.weights)
    ckpt = cpr_ext.Checkpointer(
        whole,
        [tables, wrapper if forgotten == "inner" else dense],
        "store",
        state=state,
        num_shards=2,
    )
    report = ckpt.recover()
    average.weights.update(report.state.get("average", {}))
    while ckpt.step_count < 20:
        rows = reader.read(generator)
        tables.zero_grad()
        dense.zero_grad()
        (model(rows) + teacher(model[0](rows))).square().mean().backward()
        tables.step()
        wrapper.step()
        average.update(model)
        if forgotten != "scheduler":
            scheduler.step()
        ckpt.step(6)
        if forgotten == "scheduler":
            scheduler.step()


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "")
