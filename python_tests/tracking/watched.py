"""A watched model: small, with what a Checkpointer counts of its tables."""

import torch
from torch import nn

import cpr_ext
from python_tests.helpers import die, open_checkpointer

N = 40
NEVER = {"schedule": cpr_ext.EverySteps(10**6), "staging": cpr_ext.StagingOptions(num_threads=1)}


class Watched:
    """A model, its optimizers, and what a Checkpointer counts of them after a base snapshot."""

    def __init__(self, directory, model, optimizers, **options):
        self.model, self.directory = model, directory
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        options = {
            "priority": cpr_ext.MostFrequentlyUsed(1.0),
            "save_at_close": False,
            **NEVER,
            **options,
        }
        self.ckpt = open_checkpointer(model, self.optimizers, directory, **options)
        self.ckpt.step()
        self.ckpt.wait()

    def counts(self, name=None):
        """{row: times} of a table, as counted since it was last saved."""
        name = name or self.ckpt.tables[0].name
        counts = self.ckpt._trackers[name].counts()
        return {row: int(n) for row, n in enumerate(counts) if n}

    def dirty(self, name=None):
        name = name or self.ckpt.tables[0].name
        return self.ckpt._trackers[name].dirty_rows().tolist()

    def newest(self):
        return self.ckpt.store.manifest.dense[-1]

    def save(self, kind="partial"):
        self.ckpt.save(kind)
        self.ckpt.wait()
        return self.newest()

    def assert_recovers(self, make):
        """A new process goes back to exactly what the live model is."""
        rows = {table.name: table.arrays() for table in self.ckpt.tables}
        die(self.ckpt)
        self.ckpt._watch.detach()
        model, optimizers = make()
        fresh = cpr_ext.Checkpointer(model, optimizers, self.directory)
        fresh.recover(mode="full")
        for table in fresh.tables:
            for name, values in table.arrays().items():
                assert torch.equal(values, rows[table.name][name]), (table.name, name)
        fresh.close()


def make_plain(kind=torch.optim.SGD, *, sparse=True, **options):
    torch.manual_seed(0)
    model = nn.Embedding(N, 4, sparse=sparse)
    return model, [kind(model.parameters(), lr=0.1, **options)]


def plain(directory, kind=torch.optim.SGD, *, sparse=True, optimizer=None, **options):
    model, optimizers = make_plain(kind, sparse=sparse, **(optimizer or {}))
    return Watched(directory, model, optimizers, **options)


def backward(run, *rows):
    backward_of(run.model, *rows)


def backward_of(model, *rows):
    model(torch.tensor(rows)).square().sum().backward()


def hooks_of(optimizer):
    return [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
