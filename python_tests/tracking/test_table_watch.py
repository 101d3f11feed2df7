"""Which rows count as changed, and when; changes that no optimizer made; what the watch leaves."""

import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks

import cpr_ext
from cpr_ext.dlrm.rowwise_adagrad import RowWiseAdagrad
from cpr_ext.errors import SnapshotError, UntrackedChangeWarning, UsageError
from python_tests.helpers import die
from python_tests.tracking.watched import (
    NEVER,
    N,
    Watched,
    backward,
    backward_of,
    make_plain,
    plain,
)


@pytest.fixture
def run(tmp_path):
    run = plain(tmp_path)
    yield run
    if not run.ckpt._guard.is_closed:
        run.ckpt._release()


# --- which rows count ---


def test_rows_of_a_sparse_gradient_count_with_multiplicity_at_the_optimizers_step(run):
    backward(run, 1, 1, 7)
    assert run.counts() == {}
    run.optimizers[0].step()
    assert run.counts() == {1: 2, 7: 1}
    assert run.ckpt._watch.num_row_updates == 3


def test_rows_of_a_dense_gradient_count_once_if_they_are_not_zero(tmp_path):
    run = plain(tmp_path, sparse=False)
    backward(run, 1, 1, 7)
    run.model.weight.grad[9, 2] = 0.5
    run.optimizers[0].step()
    assert run.counts() == {1: 1, 7: 1, 9: 1}
    run.ckpt.close()


@pytest.mark.parametrize("sparse", [True, False])
def test_accumulated_gradients_count_when_the_optimizer_steps(tmp_path, sparse):
    run = plain(tmp_path, sparse=sparse)
    for row in (3, 3, 5):
        backward(run, row)
        run.ckpt.step()  # for a micro-batch
        assert run.counts() == {}
    run.optimizers[0].step()
    assert run.counts().keys() == {3, 5}
    run.ckpt.close()


@pytest.mark.filterwarnings("error::cpr_ext.errors.UntrackedChangeWarning")
@pytest.mark.filterwarnings("error::cpr_ext.errors.SnapshotFailedWarning")
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_a_change_in_place_that_is_reported_counts_without_a_warning(tmp_path, overlap):
    run = plain(tmp_path, overlap=overlap, consistency="step", priority=cpr_ext.AllRows())
    backward(run, 4)
    run.optimizers[0].step()
    run.ckpt.step()
    run.save("base")
    run.ckpt.schedule = cpr_ext.EverySteps(1)
    for value in (0.5, 0.25):  # the second time while a snapshot may be captured
        with torch.no_grad():
            run.model.weight[10:20] = value
        run.ckpt.record_changes()
        run.ckpt.step()
    assert run.save().is_complete
    run.assert_recovers(lambda: make_plain(torch.optim.SGD))


def test_changes_are_not_reported_in_the_middle_of_a_step(run):
    backward(run, 4)
    run.optimizers[0].step()
    with pytest.raises(UsageError, match=r"record_changes\(\) in the middle of step 2"):
        run.ckpt.record_changes()


def test_training_in_eval_mode_counts(run):
    run.model.eval()
    backward(run, 4)
    run.optimizers[0].step()
    assert run.counts() == {4: 1}


def test_evaluation_with_gradients_enabled_counts_nothing(run):
    run.model(torch.arange(N)).sum()
    backward(run, 2)
    run.model(torch.arange(N)).sum()
    run.optimizers[0].step()
    run.ckpt.step()
    assert run.counts() == {2: 1}


def test_an_index_buffer_may_be_refilled_before_the_step(run):
    indices = torch.tensor([1, 2])
    run.model(indices).sum().backward()
    indices.fill_(30)
    run.optimizers[0].step()
    assert run.counts() == {1: 1, 2: 1}


def test_a_batch_whose_forward_raised_is_skipped_without_a_trace(run):
    with pytest.raises(IndexError):
        backward(run, 5, N)
    run.optimizers[0].zero_grad()
    backward(run, 6)
    run.optimizers[0].step()
    run.ckpt.step()
    assert run.counts() == {6: 1}
    assert run.ckpt.step_count == 2


def test_a_subclass_with_a_forward_of_its_own_counts_what_it_changes(tmp_path):
    class Positions(nn.Embedding):
        def forward(self, mask):
            return super().forward(mask.cumsum(0) * mask + 1)

    model = Positions(N, 4, sparse=True)
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1, 1, 1, 0])).sum().backward()
    run.optimizers[0].step()
    assert run.counts() == {1: 1, 2: 1, 3: 1, 4: 1}
    run.ckpt.close()


def test_a_parameter_given_as_table_counts_without_a_module(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(N, 4))

        def forward(self, ids):
            return F.embedding(ids, self.rows, sparse=True)

    model = Functional()
    optimizer = torch.optim.SparseAdam(model.parameters())
    run = Watched(tmp_path, model, optimizer, tables={"rows": model.rows})
    backward(run, 8, 9)
    optimizer.step()
    assert run.counts() == {8: 1, 9: 1}
    run.ckpt.close()


def test_a_weight_tied_to_a_linear_layer_counts_every_row_that_it_changes(tmp_path):
    table, linear = nn.Embedding(N, 4), nn.Linear(4, N, bias=False)
    linear.weight = table.weight
    model = nn.Sequential(table, linear)
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    backward(run, 3)
    run.optimizers[0].step()
    run.ckpt.step()
    assert run.dirty() == list(range(N))
    assert run.save().is_complete
    run.ckpt.close()


def test_padding_and_indices_past_the_last_offset_count_if_they_change_a_row(tmp_path):
    """PyTorch itself trains on indices past the last offset, and not on padding."""
    model = nn.EmbeddingBag(N, 4, sparse=True, mode="sum", padding_idx=0, include_last_offset=True)
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    model(torch.tensor([0, 5, 6, 20, 21]), torch.tensor([0, 2, 3])).sum().backward()
    run.optimizers[0].step()
    changed = (model.weight != before).any(dim=1).nonzero().view(-1).tolist()
    assert sorted(run.counts()) == changed
    assert 0 not in changed
    run.ckpt.close()


def test_a_gradient_of_another_layout_or_stride_counts_its_rows(run):
    weight = run.model.weight
    weight.grad = torch.zeros(4, N).T
    weight.grad[11] = 1.0
    run.optimizers[0].step()
    assert run.counts() == {11: 1}


def test_a_step_that_a_gradient_scaler_skips_counts_nothing(run):
    backward(run, 3)
    run.optimizers[0].zero_grad()  # infinite: the scaler does not call step()
    run.ckpt.step()
    assert run.counts() == {}
    assert not run.ckpt._watch.has_stepped


# --- closures and other hooks ---


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
    run.ckpt.close()


@pytest.mark.filterwarnings("error::cpr_ext.errors.UntrackedChangeWarning")
def test_lbfgs_which_moves_all_rows_is_saved_whole(tmp_path):
    """It makes new tensors for its state at each step, which is no change by somebody else."""
    run = plain(tmp_path, torch.optim.LBFGS, sparse=False, optimizer={"max_iter": 3})
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
    run.ckpt.close()


def test_a_users_hook_that_clamps_after_the_step_makes_the_whole_table_dirty(run):
    def clamp(*_):
        with torch.no_grad():
            run.model.weight.clamp_(-0.1, 0.1)

    run.optimizers[0].register_step_post_hook(clamp)
    backward(run, 3)
    run.optimizers[0].step()
    run.ckpt.step()
    with pytest.warns(UntrackedChangeWarning, match="'embedding' was changed outside"):
        record = run.save()
    assert record.is_complete
    run.assert_recovers(make_plain)


# --- changes by something else than the optimizer ---


def clamp(run):
    with torch.no_grad():
        run.model.weight.clamp_(-0.1, 0.1)


def reset_a_row(run):
    with torch.no_grad():
        run.model.weight[17] = 0.0


def load(run):
    run.model.load_state_dict({"weight": torch.ones(N, 4)})


def scale_state(run):
    run.optimizers[0].state[run.model.weight]["sum"].mul_(0.5)


def replace_state_tensor(run):
    run.optimizers[0].state[run.model.weight]["sum"] = torch.full((N, 4), 3.0)


def load_optimizer(run):
    run.optimizers[0].load_state_dict(copy.deepcopy(run.optimizers[0].state_dict()))


@pytest.mark.parametrize(
    "change", [clamp, reset_a_row, load, scale_state, replace_state_tensor, load_optimizer]
)
def test_a_change_outside_is_reported_once_and_the_next_snapshot_is_complete_and_right(
    tmp_path, change
):
    run = plain(tmp_path, torch.optim.Adagrad)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for row in (3, 4):
            change(run)
            backward(run, row)
            run.optimizers[0].step()
            run.ckpt.step()
        assert run.save().is_complete
    assert len([each for each in warned if each.category is UntrackedChangeWarning]) == 1
    run.assert_recovers(lambda: make_plain(torch.optim.Adagrad))


def test_each_table_is_reported_once_and_only_it_is_dirty(tmp_path):
    model = nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in "ab":
        with torch.no_grad():
            model[name].weight.clamp_(-0.1, 0.1)
        with pytest.warns(UntrackedChangeWarning, match=f"'{name}' was changed outside"):
            run.save()
    with torch.no_grad():
        model["a"].weight.clamp_(-0.1, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.ckpt._watch.check_all()
    run.ckpt._watch.settle()
    assert (run.dirty("a"), run.dirty("b")) == (list(range(N)), [])
    run.ckpt.close()


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_a_base_in_pieces_between_which_a_table_changed_outside_is_not_complete(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(20_000, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(
        model,
        optimizer,
        tmp_path,
        overlap="never",
        **{**NEVER, "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10, num_threads=1)},
    ) as ckpt:
        handle, snapshot = ckpt.step(), ckpt._saver.in_flight
        assert 0 < snapshot.bytes_captured < model.weight.nbytes
        with torch.no_grad():
            model.weight.mul_(0.5)
        ckpt.wait()  # the other rows, at the same step
        assert snapshot.first_step == snapshot.last_step == 1
        assert handle.step == 1
        assert not handle.is_complete
        ckpt.save("base")
        ckpt.wait()
        assert ckpt.store.dense.segments[-1].is_complete


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_rows_changed_outside_count_as_stale_when_a_live_shard_is_lost(tmp_path):
    run = plain(tmp_path, num_shards=2)
    clamp(run)
    backward(run, 3)
    run.optimizers[0].step()
    run.ckpt.step()
    assert run.ckpt.recover(shards=[1]).rows_stale == N // 2
    run.ckpt.close()


def freeze(run):
    run.optimizers[0].param_groups.clear()
    run.model.weight.requires_grad_(False)
    run.model.weight.grad = None


def set_to_zero(name):
    def change(run):
        run.optimizers[0].param_groups[0][name] = 0

    return change


@pytest.mark.parametrize(
    ("kind", "options", "change"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, set_to_zero("momentum")),
        (torch.optim.SGD, {"weight_decay": 0.1}, set_to_zero("weight_decay")),
        (torch.optim.Adam, {}, freeze),
    ],
)
def test_rows_moved_without_a_gradient_are_saved_after_the_optimizer_has_ceased_to_move_them(
    tmp_path, kind, options, change
):
    run = plain(tmp_path, kind, sparse=False, optimizer=options)

    def train(*rows):
        run.optimizers[0].zero_grad()
        backward(run, *rows)
        run.optimizers[0].step()
        run.ckpt.step()

    train(*range(20))
    run.save("base")
    for _ in range(3):
        train(39)  # and rows 0 to 19 by momentum or decay
    change(run)
    if change is not freeze:
        train(39)
    assert run.save().is_complete
    expected = run.model.weight.detach().clone()
    die(run.ckpt)
    model, optimizers = make_plain(kind, sparse=False, **options)
    fresh = cpr_ext.Checkpointer(model, optimizers, tmp_path)
    if change is freeze:
        optimizers[0].param_groups.clear()
    fresh.recover(mode="full")
    assert torch.equal(model.weight, expected)
    fresh.close()


# --- optimizers that are not what was given ---


def test_an_optimizer_that_was_not_given_is_refused_by_kind_and_table(tmp_path):
    model = nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})
    first = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    run = Watched(tmp_path, model, first)
    second = torch.optim.Adagrad(model["b"].parameters(), lr=0.1)
    model["b"](torch.tensor([1])).sum().backward()
    second.step()
    with pytest.raises(UsageError, match=r"an? Adagrad .* updates table 'b'"):
        run.ckpt.step()
    run.ckpt.close()


def test_after_an_optimizer_was_replaced_nothing_more_is_saved(tmp_path):
    torch.manual_seed(0)
    model = nn.Embedding(20_000, 8)
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = cpr_ext.Checkpointer(
        model,
        first,
        tmp_path,
        overlap="never",
        **{**NEVER, "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10, num_threads=1)},
    )
    snapshot = ckpt.step()
    assert snapshot.state == "capturing"
    model(torch.arange(20_000)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for call in (ckpt.step, ckpt.save, lambda: ckpt.save("base")):
        with pytest.raises(UsageError, match=r"a SGD .* table 'embedding'"):
            call()
    with pytest.raises(SnapshotError, match="a SGD that the Checkpointer does not know"):
        ckpt.close()
    assert ckpt.store.is_empty


def test_an_optimizer_of_another_model_is_none_of_ours(run):
    other, (optimizer,) = make_plain()
    other(torch.tensor([1])).sum().backward()
    optimizer.step()
    run.ckpt.step()
    assert run.counts() == {}


def test_a_parameter_group_may_be_removed(tmp_path):
    model = nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})
    optimizer = torch.optim.SGD([{"params": model[n].parameters()} for n in "ab"], lr=0.1)
    run = Watched(tmp_path, model, optimizer)
    optimizer.param_groups.pop(0)
    for name in "ab":
        model[name](torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    run.ckpt.step()
    assert (run.counts("a"), run.counts("b")) == ({}, {1: 1, 2: 1})
    assert run.save().is_complete
    run.ckpt.close()


def test_two_optimizers_each_count_their_own_table(tmp_path):
    model = nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})
    run = Watched(
        tmp_path, model, [torch.optim.SGD(model[name].parameters(), lr=0.1) for name in "ab"]
    )
    for name in "ab":
        model[name](torch.tensor([1, 2])).sum().backward()
    run.optimizers[1].step()
    assert (run.counts("a"), run.counts("b")) == ({}, {1: 1, 2: 1})
    run.optimizers[0].step()
    assert run.counts("a") == {1: 1, 2: 1}
    run.ckpt.close()


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

    run = plain(tmp_path, Halting)
    (optimizer,) = run.optimizers
    optimizer.fails = True
    backward(run, 3)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert run.ckpt._watch.is_inside_step
    assert run.ckpt.save().state == "requested"
    optimizer.fails = False
    optimizer.step()  # again
    run.ckpt.step()
    run.ckpt.wait()
    assert run.newest().is_complete
    run.assert_recovers(lambda: make_plain(Halting))


@pytest.mark.parametrize("changed", ["a", "b", None])
def test_a_step_that_raised_hides_no_change_behind_the_next_step_of_another_optimizer(
    tmp_path, changed
):
    model = nn.ModuleDict({name: nn.Embedding(N, 4, sparse=True) for name in "ab"})
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
        run.ckpt._watch.check_all()
    run.ckpt._watch.settle()
    expected = {"a": [1], "b": [], changed: list(range(N))}
    assert {name: run.dirty(name) for name in "ab"} == {name: expected[name] for name in "ab"}
    own = [each for each in warned if each.category is UntrackedChangeWarning]
    assert len(own) == (changed is not None)
    run.ckpt.close()


# --- counting fails ---


class FailedCounter:
    """As the native one is once its thread has failed; see test_background_counter.py."""

    error = "std::bad_alloc"

    def count(self, tables):
        raise MemoryError(self.error)


def test_rows_that_could_not_be_counted_are_never_forgotten(run):
    backward(run, 3)
    run.optimizers[0].step()
    snapshot = run.ckpt.save()  # requested: an optimizer has stepped
    run.ckpt._watch._counter = FailedCounter()
    for _ in range(3):
        for call in (run.ckpt.step, run.ckpt.save, lambda: run.ckpt.save("base")):
            with pytest.raises(UsageError, match=r"could not be counted: std::bad_alloc.* new"):
                call()
        assert not run.ckpt._watch.is_proven(run.ckpt.tables[0])
        with pytest.raises(MemoryError):
            run.optimizers[0].step()
    with pytest.raises(SnapshotError, match="could not be counted"):
        run.ckpt.close()
    assert snapshot.state == "failed"
    assert not hooks_of(run.optimizers[0])
    assert len(run.ckpt.store.dense.segments) == 1


# --- the life of a watched model ---


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(N, 4, sparse=True)

    def forward(self, ids):
        return self.table(ids)


def test_a_watched_model_is_saved_pickled_copied_scripted_and_differentiated_as_ever(tmp_path):
    model = Named()
    run = Watched(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    file = io.BytesIO()
    torch.save(model, file)
    ids = torch.tensor([1, 2])
    for other in (
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        torch.jit.script(model),
        torch.load(io.BytesIO(file.getvalue()), weights_only=False),
    ):
        assert torch.equal(other(ids), model(ids))

    def loss(weight, row):
        return F.embedding(row, weight).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    assert per_sample(model.table.weight.detach(), ids.view(2, 1)).shape == (2, N, 4)
    pickle.dumps(run.optimizers[0].state_dict())
    run.ckpt.step()
    assert run.counts() == {}
    run.ckpt.close()


def test_training_a_deep_copy_counts_nothing(run):
    model, optimizer = copy.deepcopy((run.model, run.optimizers[0]))
    model(torch.tensor([5])).sum().backward()
    optimizer.step()
    run.ckpt.step()
    assert run.counts() == {}


def test_a_compiled_step_of_an_optimizer_counts(run):
    @torch.compile(backend="eager")
    def step():
        run.optimizers[0].step()

    for row in (3, 4):
        run.optimizers[0].zero_grad()
        backward(run, row)
        step()
        run.ckpt.step()
    if run.counts() != {3: 1, 4: 1}:  # not seen by hooks: then the whole table is dirty
        run.ckpt._watch.settle()
        assert run.dirty() == list(range(N))
    assert run.save().is_complete
    run.assert_recovers(make_plain)


def hooks_of(optimizer):
    return [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]


def test_no_hook_is_left_after_close(tmp_path):
    before = list(global_hooks)
    run = plain(tmp_path)
    assert hooks_of(run.optimizers[0])
    assert len(global_hooks) == len(before) + 1
    run.ckpt.close()
    assert not hooks_of(run.optimizers[0])
    assert list(global_hooks) == before
    backward(run, 1)
    run.optimizers[0].step()
    assert run.counts() == {}


def test_no_hook_is_left_once_a_checkpointer_is_garbage(tmp_path):
    gc.collect()
    before = list(global_hooks)
    run = plain(tmp_path)
    (optimizer,) = run.optimizers
    del run
    gc.collect()
    assert not hooks_of(optimizer)
    assert list(global_hooks) == before


def test_a_checkpointer_may_become_garbage_while_an_optimizer_calls_its_hooks(tmp_path):
    gc.collect()
    before = list(global_hooks)
    run = plain(tmp_path / "first")
    model, (optimizer,) = run.model, run.optimizers
    own = optimizer.register_step_pre_hook(lambda *_: gc.collect() and None)
    optimizer.register_step_pre_hook(lambda *_: None)  # there is a next one to be called
    del run
    backward_of(model, 1)
    optimizer.step()  # not "OrderedDict mutated during iteration"
    own.remove()
    plain(tmp_path / "second").ckpt.close()  # what could not be removed then is removed now
    assert list(global_hooks) == before
    assert len(hooks_of(optimizer)) == 1


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
        assert checkpointer._watch.num_row_updates == 3


def test_a_wrapper_that_hides_its_optimizer_is_refused(tmp_path):
    hidden = object.__new__(Wrapper)
    hidden.optimizer = "not one"
    with pytest.raises(UsageError, match="a Wrapper cannot be watched"):
        cpr_ext.Checkpointer(torch.nn.Embedding(20, 4), hidden, tmp_path)
