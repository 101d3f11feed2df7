"""Closures, hooks, wrappers and replaced optimizers: which change rows, which are refused."""

import warnings

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import SnapshotError, UntrackedChangeWarning, UsageError
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.tracking.watched import NEVER, N, Watched, backward, make_plain, plain


def two_tables():
    return nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad])
@pytest.mark.parametrize("by_name", [True, False])
def test_the_gradient_that_a_closure_makes_counts(tmp_path, kind, by_name):
    run = plain(tmp_path, kind)
    (optimizer,) = run.optimizers
    backward(run, 30)  # of before: the closure drops it

    def closure():
        optimizer.zero_grad()
        loss = run.model(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss is not None
    assert run.counts() == {1: 1, 2: 1}


@pytest.mark.filterwarnings("error::cpr_ext.errors.UntrackedChangeWarning")
def test_lbfgs_which_moves_all_rows_is_saved_whole(tmp_path):
    """It makes new tensors for its state at each step, which is no change by somebody else."""
    options = {"optimizer": {"max_iter": 3}, "priority": cpr_ext.AllRows()}
    run = plain(tmp_path, torch.optim.LBFGS, sparse=False, **options)
    (optimizer,) = run.optimizers

    def closure():
        optimizer.zero_grad()
        loss = run.model(torch.tensor([1, 2])).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        run.ckpt.step()
    run.save()
    run.assert_recovers(lambda: make_plain(torch.optim.LBFGS, sparse=False, max_iter=3))


def test_a_users_hook_that_changes_the_gradient_is_seen(tmp_path):
    run = plain(tmp_path, sparse=False)

    def penalise(*_):
        run.model.weight.grad.add_(run.model.weight.detach(), alpha=0.1)

    run.optimizers[0].register_step_pre_hook(penalise)
    backward(run, 3)
    run.optimizers[0].step()
    assert len(run.counts()) == N


def test_an_optimizer_that_was_not_given_is_refused_by_kind_and_table(tmp_path):
    model = two_tables()
    first = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    run = Watched(tmp_path, model, first)
    second = torch.optim.Adagrad(model["b"].parameters(), lr=0.1)
    model["b"](torch.tensor([1])).sum().backward()
    second.step()
    with pytest.raises(UsageError, match=r"an? Adagrad .* updates table 'b'"):
        run.ckpt.step()


def test_after_an_optimizer_was_replaced_nothing_more_is_saved(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(20_000, 8)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {**NEVER, "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10, num_threads=1)}
    ckpt = cpr_ext.Checkpointer(model, first, tmp_path, **options)
    assert ckpt.step().state == "capturing"
    model(torch.arange(20_000)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for call in (ckpt.step, ckpt.save, lambda: ckpt.save("base")):
        with pytest.raises(UsageError, match=r"a SGD .* table 'embedding'"):
            call()
    with pytest.raises(SnapshotError, match="a SGD that the Checkpointer does not know"):
        ckpt.close()
    assert ckpt.store.is_empty


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_a_step_that_raises_half_way_leaves_nothing_unsaved(tmp_path):
    class Halting(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            with torch.no_grad():
                parameter = self.param_groups[0]["params"][0]
                if self.fails:
                    parameter[25] = 7.0
                    raise ArithmeticError
            return super().step(closure)

    run = plain(tmp_path, Halting, priority=cpr_ext.AllRows())
    (optimizer,) = run.optimizers
    Halting.fails = True
    backward(run, 3)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert run.ckpt._watch.is_inside_step
    assert run.ckpt.save().state == "requested"
    Halting.fails = False
    optimizer.step()  # again
    run.ckpt.step()
    run.ckpt.wait()
    assert run.newest().is_complete
    run.assert_recovers(lambda: make_plain(Halting))


@pytest.mark.parametrize("changed", ["a", "b", None])
def test_a_step_that_raised_hides_no_change_behind_the_next_step_of_another_optimizer(
    tmp_path, changed
):
    model = two_tables()
    optimizers = [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]
    run = Watched(tmp_path, model, optimizers)

    def closure():
        raise ArithmeticError

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ArithmeticError):
            optimizers[1].step(closure)
        if changed is not None:
            with torch.no_grad():
                model[changed].weight.clamp_(-0.1, 0.1)
        model["a"](torch.tensor([1])).sum().backward()
        optimizers[0].step()
        run.ckpt.step()
        run.ckpt._watch.check(replaced=True)
    run.ckpt._watch.changes.settle()
    expected = {"a": [1], "b": [], changed: list(range(N))}
    assert {name: run.dirty(name) for name in "ab"} == {name: expected[name] for name in "ab"}
    own = [each for each in warned if each.category is UntrackedChangeWarning]
    assert len(own) == (changed is not None)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by its class, without any of an optimizer's attributes."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Sharing:
    """As Lightning's: it steps another optimizer, all of whose attributes it shares."""

    @staticmethod
    def of(optimizer):
        made = object.__new__(type("Sharing", (torch.optim.SGD,), {}))
        made.__dict__ = dict(optimizer.__dict__)
        return made


@pytest.mark.parametrize("wrap", [Wrapper, Sharing.of])
def test_an_optimizer_in_a_wrapper_is_known(tmp_path, wrap):
    model = torch.nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, wrap(optimizer), tmp_path) as checkpointer:
        model(torch.tensor([3, 5, 5])).sum().backward()
        optimizer.step()
        checkpointer.step()
        assert checkpointer._watch.rows.num_updates == 3
