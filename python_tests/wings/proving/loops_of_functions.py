"""Functions of a loop, for ``cpr_ext.prove``."""

import torch
from torch import nn

import cpr_ext


class Counter:
    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def build():
    model = nn.Sequential(nn.EmbeddingBag(40, 4, sparse=True), nn.Linear(4, 1))
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1), Counter()


def train_step(job, step):
    (counter,) = job.others
    counter.position += 3
    rows = torch.arange(counter.position, counter.position + 6).reshape(2, 3) % 40
    job.optimizers.zero_grad()
    job.model(rows).square().mean().backward()
    job.optimizers.step()
    return len(rows)


def forgets_others(model, optimizers, directory, counter):
    return cpr_ext.Checkpointer(model, optimizers, directory)
