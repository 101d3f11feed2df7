"""Tables that one job has in parts, and another whole among its dense parameters."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import StoreError
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad

ROWS, DIM = 12, 4
KINDS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,  # makes its state at its first step
    "rowwise_adagrad": RowWiseAdagrad,
}
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


class Model(torch.nn.Module):
    """Table ``t``, and a dense layer; ``begin`` and ``end``: the rows that this process has."""

    def __init__(self, begin=0, end=ROWS, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.t = torch.nn.Embedding(end - begin, DIM)
        self.linear = torch.nn.Linear(DIM, 1)


def train(model, optimizers, steps=2):
    for _ in range(steps):
        model.linear(model.t.weight).sin().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def cut_job(directory, kind, cuts, *, steps=2, seed=0):
    """Checkpointers of a job whose processes have the rows of ``cuts`` each."""
    found = []
    for number, (begin, end) in enumerate(cuts):
        model = Model(begin, end, seed + number)
        dense = torch.optim.Adam(model.linear.parameters(), lr=0.01)
        of_rows = KINDS[kind]([model.t.weight], lr=0.1)
        part = TablePart("t", (begin, end), (0, DIM), ROWS, DIM)
        table = Table(part.name, model.t.weight, of_rows, part=part)
        ckpt = cpr_ext.Checkpointer(
            model, [of_rows, dense], directory / str(number), tables=[table], **OPTIONS
        )
        if steps:
            train(model, [of_rows, dense], steps)
        found.append((ckpt, model, of_rows, dense))
    return found


def whole_job(directory, kind, *, steps=2, seed=0, one_optimizer=False):
    """A process that has the table as a dense parameter."""
    model = Model(seed=seed)
    if one_optimizer:
        groups = [{"params": [model.t.weight], "lr": 0.1}, {"params": model.linear.parameters()}]
        optimizers = [torch.optim.Adam(groups, lr=0.01)]
    else:
        dense = torch.optim.Adam(model.linear.parameters(), lr=0.01)
        optimizers = [KINDS[kind]([model.t.weight], lr=0.1), dense]
    ckpt = cpr_ext.Checkpointer(model, optimizers, directory, tables=[], **OPTIONS)
    train(model, optimizers, steps)
    return ckpt, model, optimizers


def save(*jobs):
    for ckpt, *_ in jobs:
        ckpt.step()
        ckpt.save("base").wait_until_done()
        ckpt.close()


def state_of(optimizer, weight):
    """State by row: (rows, 1) of one is (rows,) of another."""
    return {
        name: value.flatten() if value.numel() == len(weight) else value
        for name, value in optimizer.state.get(weight, {}).items()
        if value.dim() > 0
    }


CUTS = [(0, 5), (5, ROWS)]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_become_a_dense_parameter(tmp_path, kind):
    old = cut_job(tmp_path / "old", kind, CUTS, steps=3)
    save(*old)
    new = whole_job(tmp_path / "new", kind, steps=0, seed=7)
    ckpt, model, (of_table, dense) = new
    report = ckpt.recover(from_store=[tmp_path / "old" / "0", tmp_path / "old" / "1"])
    assert report.differences == []
    assert torch.equal(model.t.weight, torch.cat([m.t.weight for _, m, *_ in old]))
    states = [state_of(of_rows, m.t.weight) for _, m, of_rows, _ in old]
    found = state_of(of_table, model.t.weight)
    assert found.keys() == states[0].keys()
    for name, value in found.items():
        assert torch.equal(value, torch.cat([state[name] for state in states]))
    if kind == "adam":  # it corrects its first steps, so it matters how many there were
        assert of_table.state[model.t.weight]["step"] == 3
    moments = [o.state[m.linear.weight]["exp_avg"] for _, m, _, o in old]
    assert any(torch.equal(dense.state[model.linear.weight]["exp_avg"], m) for m in moments)
    train(model, [of_table, dense])  # its state is whole
    ckpt.close()


@pytest.mark.parametrize(
    ("kind", "one_optimizer"), [*((kind, False) for kind in KINDS), ("adam", True)]
)
def test_a_dense_parameter_becomes_parts(tmp_path, kind, one_optimizer):
    old = whole_job(tmp_path / "old", kind, one_optimizer=one_optimizer)
    save(old)
    _, trained, optimizers = old
    parts = cut_job(tmp_path / "new", kind, CUTS, steps=0, seed=7)
    for (ckpt, model, of_rows, dense), (begin, end) in zip(parts, CUTS, strict=True):
        ckpt.recover(from_store=[tmp_path / "old"])
        assert torch.equal(model.t.weight, trained.t.weight[begin:end])
        expected = state_of(optimizers[0], trained.t.weight)
        found = state_of(of_rows, model.t.weight)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name][begin:end])
        assert torch.equal(
            dense.state[model.linear.weight]["exp_avg"],
            optimizers[-1].state[trained.linear.weight]["exp_avg"],
        )
        ckpt.close()


def test_state_of_another_optimizer_is_refused_and_left_out(tmp_path):
    old = whole_job(tmp_path / "old", "sgd", one_optimizer=True)
    save(old)
    ((ckpt, model, of_rows, dense),) = cut_job(
        tmp_path / "new", "adagrad", [(0, ROWS)], steps=0, seed=7
    )
    with pytest.raises(StoreError, match="'t/sum' is not in the store"):
        ckpt.recover(from_store=[tmp_path / "old"])
    report = ckpt.recover(from_store=[tmp_path / "old"], strict=False)
    assert "'t/sum' is not in the store" in report.differences
    assert torch.equal(model.t.weight, old[1].t.weight)
    assert not of_rows.state[model.t.weight]["sum"].any()
    assert dense.state[model.linear.weight]["step"] == 2
    ckpt.close()


def test_steps_that_no_store_shows_are_named(tmp_path):
    """The newest dense part is of a process without a row of the table."""
    save(*cut_job(tmp_path / "old", "adam", [(0, ROWS)]))
    other = torch.nn.Module()
    other.linear = torch.nn.Linear(DIM, 1)
    dense = torch.optim.Adam(other.linear.parameters(), lr=0.01)
    with cpr_ext.Checkpointer(other, dense, tmp_path / "ahead", tables=[], **OPTIONS) as ahead:
        for _ in range(5):
            other.linear(torch.ones(DIM)).sum().backward()
            dense.step()
            ahead.step()
    stores = [tmp_path / "old" / "0", tmp_path / "ahead"]
    ckpt, model, _ = whole_job(tmp_path / "new", "adam", steps=0, seed=7)
    before = model.t.weight.detach().clone()
    with pytest.raises(StoreError, match="do not show how many steps its optimizer has done"):
        ckpt.recover(from_store=stores)
    assert torch.equal(model.t.weight, before)
    assert len(ckpt.recover(from_store=stores, strict=False).differences) == 1
    ckpt.close()
