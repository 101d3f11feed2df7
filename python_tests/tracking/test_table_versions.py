"""Changes that no optimizer made, next to its steps: before, inside and after them."""

import warnings

import pytest
import torch
from torch import nn

from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.tracking.watched import N, Watched

# More steps than any part of the watch needs to learn how an optimizer writes.
STEADY_STEPS = 12
KINDS = [  # and whether each table has an optimizer of its own
    pytest.param(torch.optim.SGD, False, id="sgd"),
    pytest.param(torch.optim.SGD, True, id="two_sgd"),
    pytest.param(torch.optim.Adagrad, False, id="adagrad"),
    pytest.param(RowWiseAdagrad, True, id="two_rowwise_adagrad"),
]


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Embedding(N, 4, sparse=True)
        self.b = nn.Embedding(N, 4, sparse=True)

    def forward(self, ids):
        return self.a(ids)


def odd(kind):
    """An optimizer whose step writes nothing while ``skips``, or calls something else first."""

    class Odd(kind):
        updates_only_looked_up_rows = True  # unlike what is said of classes nobody knows
        skips = False
        first = None

        def step(self, closure=None):
            if self.first is not None:
                self.first()
            return None if self.skips else super().step(closure)

    return Odd


def make(kind, *, apart):
    model = Tables()
    groups = [[model.a.weight], [model.b.weight]] if apart else [list(model.parameters())]
    return model, [kind(group, lr=0.1) for group in groups]


class Loop:
    """Two tables whose optimizers have written each step alike for some time."""

    def __init__(self, directory, kind, *, apart=False):
        self.kind = odd(kind)
        model, optimizers = make(self.kind, apart=apart)
        self.run = Watched(directory, model, optimizers)
        self.model, self.optimizers, self.ckpt = model, optimizers, self.run.ckpt
        for row in range(STEADY_STEPS):
            self.train(row)
        assert self.run.save().is_complete

    def do(self, *actions):
        for action in actions:
            if isinstance(action, tuple):  # a closure of all optimizers' steps
                for optimizer in self.optimizers:
                    optimizer.step(lambda actions=action: self.do(*actions))
            else:
                getattr(self, action)()

    def zero(self, *, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def zeros(self):
        self.zero(set_to_none=False)

    def backward(self, row, tables="ab"):
        for name in tables:
            getattr(self.model, name)(torch.tensor([row])).square().sum().backward()

    def a(self):
        self.backward(3, "a")

    def ab(self):
        self.backward(3)

    def no_rows(self):
        """A gradient of table b that has none."""
        nothing = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4)
        self.model.b.weight.grad = torch.sparse_coo_tensor(*nothing, (N, 4))

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def step_first(self):
        self.optimizers[0].step()

    def end(self):
        self.ckpt.step()

    def train(self, row, tables="ab"):
        self.zero()
        self.backward(row, tables)
        self.step()
        self.ckpt.step()

    def train_a(self):
        self.train(4, "a")

    def write(self, *_):
        """As often as a step of SGD writes: once."""
        with torch.no_grad():
            self.model.b.weight.clamp_(-0.1, 0.1)

    def write_state(self):
        """As often as a step writes them: weight and state once each."""
        self.write()
        with torch.no_grad():
            for value in self.run.ckpt.tables[1].optimizer.state[self.model.b.weight].values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)

    def skip(self):
        self.kind.skips = True
        self.step()
        self.kind.skips = False

    def hook_before(self):
        self.hook = self.optimizers[0].register_step_pre_hook(self.write)

    def hook_after(self):
        self.hook = self.optimizers[0].register_step_post_hook(self.write)

    def unhook(self):
        self.hook.remove()

    def train_writing(self):
        """The step itself writes to a table of which it has no gradient."""
        self.optimizers[-1].first = self.write
        self.train(3, "a")
        self.optimizers[-1].first = None


#: The last gradients of a closure were not all applied: "zero" behind it.
VARIANTS = [
    ["zero", "a", "write", "step", "end"],
    ["zero", "a", "step", "write", "end", "train_a"],
    ["train_a", "write", "train_a"],
    ["write", "zero", "step", "end"],
    ["zeros", "a", "write", "step", "end"],
    ["zero", "a", "no_rows", "write", "step", "end"],
    ["zero", "ab", "write", "skip", "end"],
    ["zero", "ab", "skip", "write", "end", "train_a"],
    ["zero", "ab", "write_state", "skip", "end"],
    ["zero", "ab", "write", "end", "train_a"],  # a gradient scaler does not call step()
    ["zero", "a", "write", "step_first", "end", "train_a"],
    ["write", ("zero", "a"), "zero", "end"],
    [("zero", "a", "write"), "zero", "end"],
    [("zero", "ab", "write"), "zero", "end"],
    ["hook_before", "train_a", "unhook"],
    ["hook_after", "train_a", "unhook", "train_a"],
    ["train_writing"],
]


@pytest.mark.parametrize(("kind", "apart"), KINDS)
@pytest.mark.parametrize("actions", VARIANTS, ids=str)
def test_a_write_outside_is_seen_beside_a_step_that_wrote_nothing(tmp_path, actions, kind, apart):
    loop = Loop(tmp_path, kind, apart=apart)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loop.do(*actions)
        loop.ckpt._watch.check(replaced=True)
    own = [str(each.message) for each in warned if each.category is UntrackedChangeWarning]
    assert len(own) == 1
    assert own[0].startswith("table 'b' was changed outside")
    loop.ckpt._watch.changes.settle()
    assert loop.run.dirty("b") == list(range(N))
    assert loop.run.save().is_complete
    loop.run.assert_recovers(lambda: make(loop.kind, apart=apart))


def test_steps_of_all_kinds_are_nobody_elses_changes(tmp_path):
    """Not a warning, and what counts are the rows of gradients."""
    for number, kind in enumerate([*(each.values[0] for each in KINDS), torch.optim.SparseAdam]):
        loop = Loop(tmp_path / str(number), kind, apart=number % 2 == 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for row in range(STEADY_STEPS):
                loop.train(20 + row, ["a", "b", "ab", ""][row % 4])
            assert loop.run.save().is_complete
        loop.run.ckpt.close()
