"""What rows are captured from is kept between snapshots, and made anew once memory is another."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import SnapshotError
from cpr_ext.saving.segment_capture import WriteOptions, place_of
from python_tests.helpers import assert_same, die, open_checkpointer

N = 64
pytestmark = pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")


class Run:
    """A table with state of its rows, which is trained by the whole."""

    def __init__(self, directory):
        self.model = nn.Embedding(N, 4, sparse=True)
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        options = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**9)}
        self.ckpt = open_checkpointer(
            self.model, self.optimizer, directory, save_at_close=False, **options
        )
        self.source = self.ckpt.session.saver._parts.context.sources.of

    def train(self, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randint(0, N, (16,))).square().sum().backward()
            self.optimizer.step()
            self.ckpt.step()

    @property
    def sum(self):
        return self.optimizer.state[self.model.weight]["sum"]

    def rows(self):
        return {name: array.clone() for name, array in self.ckpt.tables[0].arrays().items()}


def give_weight_other_memory(run):
    run.model.weight.data = run.model.weight.data.clone()


def resize_weight(run):
    run.model.weight.data.resize_(64 * N, 4).resize_(N, 4)


def give_state_other_memory(run):
    run.sum.data = run.sum.clone()


def resize_state(run):
    run.sum.resize_(64 * N, 4).resize_(N, 4)


def load_state(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def replace_state(run):
    run.optimizer.state[run.model.weight]["sum"] = run.sum.clone()


CHANGES = [
    give_weight_other_memory,
    resize_weight,
    give_state_other_memory,
    resize_state,
    load_state,
    replace_state,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["partial", "base"])
def test_a_snapshot_after_a_change_of_memory_is_of_the_new_one(change, kind, tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        run.train(2)
        run.ckpt.save()
        assert run.ckpt.wait()
    (table,) = run.ckpt.tables
    of_partial = partial(WriteOptions().precision_of, "partial")
    before = run.source(table, of_partial)
    assert run.source(table, of_partial) is before, "nothing was kept"
    change(run)
    run.train(2)
    assert run.source(table, of_partial) is not before
    run.ckpt.save(kind)
    assert run.ckpt.wait()
    rows = run.rows()
    die(run.ckpt)
    fresh = Run(tmp_path)
    fresh.ckpt.recover()
    assert_same(fresh.rows(), rows)


def test_a_weight_in_the_place_of_another_is_refused(tmp_path):
    run = Run(tmp_path)
    run.train(2)
    run.ckpt.save()
    assert run.ckpt.wait()
    run.model.weight = nn.Parameter(run.model.weight.detach().clone())
    handle = run.ckpt.save()  # no row is dirty, so it has none
    assert run.ckpt.wait()
    assert not handle.is_complete
    run.ckpt.save("base")
    with pytest.raises(SnapshotError) as failed:
        run.ckpt.wait()
    assert "weight was replaced" in str(failed.value.__cause__)
    die(run.ckpt)


def test_each_change_of_a_tensor_is_another_place():
    values = torch.zeros(4, 4)
    others = values[:2], values.t(), values.view(torch.int32), values.clone()
    places = [place_of(each) for each in (values, *others, torch.empty(4, 4, device="meta"))]
    assert all(places.count(place) == 1 for place in places)
    assert place_of(values.detach()) == place_of(values)


def test_closing_lets_go_of_memory(tmp_path):
    run = Run(tmp_path)
    run.train(2)
    run.ckpt.wait()
    sources = run.ckpt.session.saver._parts.context.sources
    assert sources._kept
    run.ckpt.close(save=False)
    assert not sources._kept
