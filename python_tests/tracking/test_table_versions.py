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

    def zero_grad(self, *, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, row, tables="ab"):
        for name in tables:
            getattr(self.model, name)(torch.tensor([row])).square().sum().backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, row, tables="ab"):
        self.zero_grad()
        self.backward(row, tables)
        self.step()
        self.ckpt.step()

    def write(self):
        """As often as a step of SGD writes: once."""
        with torch.no_grad():
            self.model.b.weight.clamp_(-0.1, 0.1)

    def write_state(self):
        """As often as a step writes them: weight and state once each."""
        with torch.no_grad():
            self.model.b.weight.clamp_(-0.1, 0.1)
            for value in self.run.ckpt.tables[1].optimizer.state[self.model.b.weight].values():
                if isinstance(value, torch.Tensor):
                    value.mul_(0.5)


def no_gradient_write_before(loop):
    loop.zero_grad()
    loop.backward(3, "a")
    loop.write()
    loop.step()
    loop.ckpt.step()


def no_gradient_write_after(loop):
    loop.zero_grad()
    loop.backward(3, "a")
    loop.step()
    loop.write()
    loop.ckpt.step()
    loop.train(4, "a")


def no_gradient_write_between_steps(loop):
    loop.train(3, "a")
    loop.write()
    loop.train(4, "a")


def no_gradient_at_all(loop):
    loop.write()
    loop.zero_grad()
    loop.step()
    loop.ckpt.step()


def gradient_of_zeros(loop):
    loop.zero_grad(set_to_none=False)
    loop.backward(3, "a")
    loop.write()
    loop.step()
    loop.ckpt.step()


def gradient_without_rows(loop):
    loop.zero_grad()
    loop.backward(3, "a")
    nothing = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4)
    loop.model.b.weight.grad = torch.sparse_coo_tensor(*nothing, (N, 4))
    loop.write()
    loop.step()
    loop.ckpt.step()


def skip(loop, write, *, before):
    loop.zero_grad()
    loop.backward(3)
    for optimizer in loop.optimizers:
        type(optimizer).skips = True
    if before:
        write()
    loop.step()
    if not before:
        write()
    for optimizer in loop.optimizers:
        type(optimizer).skips = False
    loop.ckpt.step()


def skipped_write_before(loop):
    skip(loop, loop.write, before=True)


def skipped_write_after(loop):
    skip(loop, loop.write, before=False)
    loop.train(4, "a")


def skipped_write_of_weight_and_state(loop):
    skip(loop, loop.write_state, before=True)


def step_never_made(loop):
    """A gradient scaler that found an infinity does not call step()."""
    loop.zero_grad()
    loop.backward(3)
    loop.write()
    loop.ckpt.step()
    loop.train(4, "a")


def only_the_other_optimizer_steps(loop):
    loop.zero_grad()
    loop.backward(3, "a")
    loop.write()
    loop.optimizers[0].step()
    loop.ckpt.step()
    loop.train(4, "a")


def closure(loop, write, *, before):
    def run():
        loop.zero_grad()
        loop.backward(3, "a")
        write()

    if before:
        loop.write()
    for optimizer in loop.optimizers:
        optimizer.step(run)
    loop.zero_grad()  # those of the closure's last call were not all applied
    loop.ckpt.step()


def closure_write_before(loop):
    closure(loop, lambda: None, before=True)


def closure_that_writes(loop):
    closure(loop, loop.write, before=False)


def closure_that_writes_what_it_has_a_gradient_of(loop):
    def run():
        loop.zero_grad()
        loop.backward(3)
        loop.write()

    for optimizer in loop.optimizers:
        optimizer.step(run)
    loop.zero_grad()  # those of the closure's last call were not all applied
    loop.ckpt.step()


def hook_that_writes_before(loop):
    handle = loop.optimizers[0].register_step_pre_hook(lambda *_: loop.write())
    loop.train(3, "a")
    handle.remove()


def hook_that_writes_after(loop):
    handle = loop.optimizers[0].register_step_post_hook(lambda *_: loop.write())
    loop.train(3, "a")
    handle.remove()
    loop.train(4, "a")


def writes_inside_the_step(loop):
    """To a table of which this step has no gradient."""
    loop.optimizers[-1].first = loop.write
    loop.train(3, "a")
    loop.optimizers[-1].first = None


VARIANTS = [
    no_gradient_write_before,
    no_gradient_write_after,
    no_gradient_write_between_steps,
    no_gradient_at_all,
    gradient_of_zeros,
    gradient_without_rows,
    skipped_write_before,
    skipped_write_after,
    skipped_write_of_weight_and_state,
    step_never_made,
    only_the_other_optimizer_steps,
    closure_write_before,
    closure_that_writes,
    closure_that_writes_what_it_has_a_gradient_of,
    hook_that_writes_before,
    hook_that_writes_after,
    writes_inside_the_step,
]


@pytest.mark.parametrize(("kind", "apart"), KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_write_outside_is_seen_beside_a_step_that_wrote_nothing(tmp_path, variant, kind, apart):
    loop = Loop(tmp_path, kind, apart=apart)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        variant(loop)
        loop.ckpt._watch.check(replaced=True)
    own = [str(each.message) for each in warned if each.category is UntrackedChangeWarning]
    assert len(own) == 1
    assert own[0].startswith("table 'b' was changed outside")
    loop.ckpt._watch.changes.settle()
    assert loop.run.dirty("b") == list(range(N))
    assert loop.run.save().is_complete
    loop.run.assert_recovers(lambda: make(loop.kind, apart=apart))


def test_a_replaced_state_is_seen_before_the_next_step(tmp_path):
    loop = Loop(tmp_path, torch.optim.Adagrad)
    state = loop.optimizers[0].state[loop.model.b.weight]
    state["sum"] = state["sum"].clone()
    loop.zero_grad()
    loop.backward(3, "a")
    with pytest.warns(UntrackedChangeWarning, match="'b' .* state was replaced"):
        loop.step()


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
