"""A watched model is saved, copied and compiled as ever; a closed Checkpointer has no hooks."""

import copy
import gc
import io
import pickle
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks

from python_tests.tracking.watched import (
    N,
    Watched,
    backward,
    backward_of,
    hooks_of,
    make_plain,
    plain,
)


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
        run.ckpt._watch.changes.settle()
        assert run.dirty() == list(range(N))
    assert run.save().is_complete
    run.assert_recovers(make_plain)


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


def test_a_checkpointer_may_become_garbage_while_an_optimizer_calls_its_hooks(tmp_path):
    """What is left of it are hooks that do nothing."""
    gc.collect()
    run = plain(tmp_path / "first")
    model, (optimizer,) = run.model, run.optimizers
    watch = weakref.ref(run.ckpt._watch)

    def collect(*_):
        gc.collect()

    optimizer.register_step_pre_hook(collect)
    optimizer.register_step_pre_hook(lambda *_: None)  # there is a next one to be called
    del run
    for _ in range(2):
        backward_of(model, 1)
        optimizer.step()  # not "OrderedDict mutated during iteration"
    assert watch() is None
