"""``state=``: a killed run with a scheduler and a scaler ends as one that nobody killed."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import cpr_ext
from cpr_ext.errors import StoreError, UntrackedChangeWarning, UsageError
from python_tests.helpers import assert_same, die

NUM_STEPS = 30
KILLED_AFTER = 19  # of which 15 are saved


class Loop:
    """Float16-like training: a schedule per step, a scaler that skips a step and grows."""

    def __init__(self, directory, *, is_saved=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.5)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [4, 12, 17, 22], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.checkpointer = cpr_ext.Checkpointer(
            self.model,
            self.optimizer,
            directory,
            priority=cpr_ext.AllRows(),
            schedule=cpr_ext.EverySteps(5, when_busy="wait"),
            state={"scheduler": self.scheduler, "scaler": self.scaler} if is_saved else None,
        )

    def train(self, num_steps):
        while self.checkpointer.step_count < num_steps:
            step = self.checkpointer.step_count
            generator = torch.Generator().manual_seed(step)
            rows = torch.randint(0, 50, (8, 3), generator=generator)
            loss = self.model(rows).square().mean() * (torch.inf if step == 13 else 1.0)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.checkpointer.step(num_samples=8)

    def state(self):
        return {
            "model": [value.clone() for value in self.model.state_dict().values()],
            "sums": [self.optimizer.state[p]["sum"].clone() for p in self.model.parameters()],
            "lr": self.optimizer.param_groups[0]["lr"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # of the skipped step
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    killed = Loop(tmp_path / "killed")
    killed.train(KILLED_AFTER)
    killed.checkpointer.wait()
    die(killed.checkpointer)
    resumed = Loop(tmp_path / "killed")
    with resumed.checkpointer as checkpointer:
        report = checkpointer.recover()
        assert 0 < report.step < KILLED_AFTER
        assert resumed.scheduler.last_epoch == report.step
        resumed.train(NUM_STEPS)
    with (whole := Loop(tmp_path / "whole")).checkpointer as checkpointer:
        checkpointer.recover()
        whole.train(NUM_STEPS)
    assert resumed.scaler.get_scale() != 64.0
    torch.testing.assert_close(resumed.state(), whole.state(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_store_of_a_run_without_state_goes_on_and_says_what_it_lacks(tmp_path):
    with pytest.warns(
        UntrackedChangeWarning,
        match=r"a learning-rate scheduler drives Adagrad.*state=\{\"scheduler\": scheduler",
    ):
        with (old := Loop(tmp_path, is_saved=False)).checkpointer:
            old.train(6)
    loop = Loop(tmp_path)
    with pytest.warns(UntrackedChangeWarning, match="holds no state of .*'scheduler'"):
        report = loop.checkpointer.recover()
    assert "made without state=" in report.differences[0]
    loop.train(11)
    loop.checkpointer.wait()
    loop.checkpointer.close()
    fresh = Loop(tmp_path)
    with fresh.checkpointer as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpointer.recover().differences == []
        assert fresh.scheduler.last_epoch == loop.scheduler.last_epoch == 11 - report.step
    with (without := Loop(tmp_path, is_saved=False)).checkpointer:
        with pytest.raises(StoreError, match=r"holds the state of .*'scheduler': 'MultiStepLR'"):
            without.checkpointer.recover()


@pytest.mark.parametrize("given", ["scheduler", "wrapped", "scaler", "unknown"])
def test_a_scheduler_that_is_given_is_not_warned_of(tmp_path, given):
    loop = Loop(tmp_path / "a", is_saved=False)
    loop.checkpointer.close()
    objects = {
        "scheduler": loop.scheduler,
        "wrapped": Wrapped(loop.scheduler),
        "scaler": loop.scaler,
        "unknown": Unknown(),
    }
    with (
        cpr_ext.Checkpointer(
            loop.model, loop.optimizer, tmp_path / "b", state={"it": objects[given]}
        ) as checkpointer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        checkpointer.step()
    found = [w for w in caught if w.category is UntrackedChangeWarning]
    assert len(found) == (given == "scaler")


class Wrapped:
    """As Accelerate wraps a scheduler."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.state_dict = scheduler.state_dict
        self.load_state_dict = scheduler.load_state_dict


class Unknown:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def averaged(directory):
    """A run with an average of its weights, which is another model."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"e": nn.Embedding(50, 4, sparse=True), "h": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    options = {"state": {"average": average}, "priority": cpr_ext.AllRows()}
    return model, optimizer, average, cpr_ext.Checkpointer(model, optimizer, directory, **options)


def test_an_average_of_the_weights_is_state_and_what_is_saved_anyway_is_refused(tmp_path):
    model, optimizer, average, ckpt = averaged(tmp_path / "store")
    with ckpt:
        for step in range(5):
            optimizer.zero_grad()
            model["h"](model["e"](torch.tensor([step]))).sum().backward()
            optimizer.step()
            average.update_parameters(model)
            ckpt.step(num_samples=1)
    _, _, again, ckpt = averaged(tmp_path / "store")
    with ckpt:
        assert ckpt.recover().step == 5
    assert int(average.n_averaged) == 5
    assert_same(dict(again.state_dict()), dict(average.state_dict()))
    for given in (model, model["h"], nn.ModuleList([model]), optimizer):
        with pytest.raises(UsageError, match="are saved without it"):
            cpr_ext.Checkpointer(model, optimizer, tmp_path / "new", state={"it": given})
