"""A run that trains in halves of a step."""

import torch

import cpr_ext
from python_tests.helpers import Trained, assert_same, make_indices

NEVER = cpr_ext.EverySteps(10**6)


class Steps(Trained):
    """Trains in halves: what a step does before, and after, its optimizers."""

    def __init__(self, directory, **options):
        options = {"optimizer": "sgd", "schedule": NEVER, "priority": cpr_ext.AllRows(), **options}
        super().__init__(directory, **options)

    def backward(self):
        generator = torch.Generator().manual_seed(self.checkpointer.step_count)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        indices = make_indices(self.model, generator, self.lookups)
        self.model(indices, torch.randn(3, 4, generator=generator)).backward()

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def newest(self):
        return self.store.manifest.dense[-1]

    def assert_recovers(self, expected, step):
        """A new process goes back to exactly this state, which is of that step."""
        if not self.checkpointer._guard.is_closed:
            self.die()
        fresh = Steps(self.store.directory, tables=self.tables, seed=5)
        assert fresh.checkpointer.recover(mode="full").step == step
        assert_same(fresh.state(), expected)
        fresh.checkpointer.close()
