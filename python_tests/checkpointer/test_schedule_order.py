"""Schedulers that step after the step was captured are warned of; loops that are right are not."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import cpr_ext
from cpr_ext.errors import UntrackedChangeWarning
from python_tests.checkpointer.test_stateful import Wrapped

EPOCHS, BATCHES = 3, 4
LATE = {"step_late", "epoch_late", "plateau_late", "wrapped_late"}
RIGHT = {"step", "epoch", "step_early", "epoch_early", "saved_after", "none"}


class Loop:
    def __init__(self, directory, kind):
        self.kind = kind
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.5)
        if kind == "plateau_late":
            self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer)
        else:
            self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        scheduler = Wrapped(self.scheduler) if kind == "wrapped_late" else self.scheduler
        self.ckpt = cpr_ext.Checkpointer(
            self.model, self.optimizer, directory, state={"scheduler": scheduler}
        )

    def train(self, until=EPOCHS * BATCHES):
        """Train from wherever the Checkpointer is; the warnings of it."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            while self.ckpt.step_count < until:
                batch = self.ckpt.step_count % BATCHES
                if batch == 0:
                    self.end_epoch("epoch_early")
                self.end_epoch("step_early")
                rows = torch.randint(0, 50, (8, 3))
                self.optimizer.zero_grad()
                self.model(rows).square().mean().backward()
                self.optimizer.step()
                self.end_epoch("step")
                if batch == BATCHES - 1:
                    self.end_epoch("epoch")
                self.ckpt.step()
                self.end_epoch("step_late")
                if batch == BATCHES - 1:
                    for kind in ("epoch_late", "plateau_late", "wrapped_late", "saved_after"):
                        self.end_epoch(kind)
                    if self.kind == "saved_after":
                        self.ckpt.save("base")
        return [w for w in caught if w.category is UntrackedChangeWarning]

    def end_epoch(self, kind):
        if kind == self.kind:
            self.scheduler.step(*([1.0] if kind == "plateau_late" else []))


pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler"),
    pytest.mark.parametrize("kind", sorted(LATE | RIGHT)),
]


def test_a_scheduler_that_steps_late_is_warned_of_once(tmp_path, kind):
    """A shard that is recovered hides none."""
    loop = Loop(tmp_path, kind)
    with loop.ckpt:
        found = loop.train(2)
        loop.ckpt.recover(shards=[0])
        found += loop.train()
    assert len(found) == (kind in LATE), [str(w.message) for w in found]
    if found:
        step = 1 if kind == "step_late" else BATCHES
        told = f".step() was called after ckpt.step() of step {step},"
        assert f"{type(loop.scheduler).__name__}{told}" in str(found[0].message)
        assert found[0].filename == __file__


@pytest.mark.parametrize("first_run", [1, BATCHES - 1, BATCHES, BATCHES + 1])
def test_a_resumed_loop_that_is_right_is_not_warned_of(tmp_path, kind, first_run):
    """Of a late one that steps in each step it still is; of others, the first run was."""
    with (loop := Loop(tmp_path, kind)).ckpt:
        loop.train(first_run)
    with (loop := Loop(tmp_path, kind)).ckpt:
        loop.ckpt.recover()
        assert len(loop.train()) == (kind == "step_late")
