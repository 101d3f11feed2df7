"""What tables consist of, and version counters, compared in one call."""

from collections import ChainMap
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cpr_ext import _C
from cpr_ext.errors import UsageError
from cpr_ext.state.table import is_row_state

WEIGHT, MEMORY, REPLACED, WRITTEN = 1, 2, 3, 4
ROWS = 3


def optimizer_of(tables, *, as_mapping=False):
    """Its state may be no dict, as that of TorchRec's optimizers."""
    state = {
        table.weight: {"sum": torch.zeros(ROWS), "step": torch.tensor(0.0)} for table in tables
    }
    return SimpleNamespace(state=ChainMap(state) if as_mapping else state)


def tables_of(number, **options):
    tables = [
        SimpleNamespace(weight=torch.nn.Parameter(torch.zeros(ROWS, 2)), num_embeddings=ROWS)
        for _ in range(number)
    ]
    optimizer = optimizer_of(tables, **options)
    for table in tables:
        table.optimizer = optimizer
    return tables


class Versions:
    """Native ones of these tables."""

    def __init__(self, tables, check=is_row_state):
        self.tables, self.native = tables, _C.TensorVersions(len(tables), check)

    def __getattr__(self, name):
        return partial(getattr(self.native, name), self.tables)


def versions_of(tables, check=is_row_state):
    versions = Versions(tables, check)
    versions.read(range(len(tables)))
    return versions


def write(tensor):
    with torch.no_grad():
        tensor.add_(1)


def state_of(table):
    return table.optimizer.state[table.weight]


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_write_is_seen_until_it_is_accepted(as_mapping):
    tables = tables_of(3, as_mapping=as_mapping)
    versions = versions_of(tables)
    assert versions.are_same()
    assert versions.differences([0, 1, 2]) == []
    write(tables[1].weight)
    write(state_of(tables[2])["sum"])
    assert not versions.are_same()
    assert versions.have_same_tensors()
    assert versions.differences([0, 1, 2]) == [(1, WEIGHT), (2, WRITTEN)]
    assert versions.differences([0, 1]) == [(1, WEIGHT)]
    versions.read([1])
    assert versions.differences([2, 1, 0]) == [(2, WRITTEN)]
    versions.accept([2])
    assert versions.are_same()


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_state_that_is_made_dropped_or_replaced_is_seen(as_mapping):
    tables = tables_of(2, as_mapping=as_mapping)
    state = state_of(tables[1])
    changes = [
        lambda: state.update(sum=torch.zeros(ROWS)),
        lambda: state.update(more=torch.zeros(ROWS, 2)),
        lambda: state.pop("sum"),
        lambda: state.clear(),
        lambda: state.update(step=torch.zeros(ROWS)),
        lambda: setattr(tables[1], "optimizer", optimizer_of(tables)),
        lambda: setattr(tables[1], "optimizer", None),
    ]
    versions = versions_of(tables)
    for change in changes:
        change()
        assert not versions.are_same()
        assert not versions.have_same_tensors()
        assert versions.has_other_state(1)
        assert not versions.has_other_state(0)
        assert versions.differences([0, 1]) == [(1, REPLACED)]
        versions.read([1])
        assert versions.are_same()


def test_what_is_no_state_of_rows_and_other_memory_are_seen_by_differences_alone():
    """A replaced state is not accepted with its table."""
    tables = tables_of(2)
    versions, state = versions_of(tables), state_of(tables[0])
    for step in (torch.tensor(1.0), 2, 2.5, None, torch.zeros(ROWS + 1)):
        state["step"] = step
        assert versions.are_same()
    state["name"] = "other"
    assert versions.are_same()
    tables[0].weight.data = torch.zeros(ROWS, 2)
    assert versions.differences([0, 1]) == [(0, MEMORY)]
    versions.read([0])
    assert versions.differences([0, 1]) == []
    write(tables[0].weight)
    state["sum"] = torch.zeros(ROWS)
    versions.accept([0])
    assert versions.differences([0, 1]) == [(0, REPLACED)]
    state["more"] = torch.zeros(ROWS)
    versions.accept([0])
    assert versions.are_same()


def test_the_state_is_found_wherever_its_optimizer_has_it():
    tables = tables_of(3)
    versions = versions_of(tables)
    state = tables[0].optimizer.state
    for table in tables:  # each is the last one now
        state[table.weight] = state.pop(table.weight)
        assert versions.are_same()
    first = tables[0].weight
    del state[first]
    assert versions.differences([0, 1, 2]) == [(0, REPLACED)]
    versions.read([0])
    assert versions.are_same()
    state[first] = {"sum": torch.zeros(ROWS)}
    assert versions.differences([0, 1, 2]) == [(0, REPLACED)]


def test_a_table_without_an_optimizer_has_a_weight_alone_and_mistakes_are_refused():
    (table,) = tables_of(1)
    table.optimizer = None
    versions = versions_of([table])
    write(table.weight)
    assert versions.differences([0]) == [(0, WEIGHT)]
    for error, call in (
        (IndexError, lambda: Versions([]).read([0])),
        (UsageError, lambda: _C.TensorVersions(0, is_row_state).are_same(tables_of(1))),
        (AttributeError, lambda: versions_of([SimpleNamespace(optimizer=None)])),
        (ZeroDivisionError, lambda: versions_of(tables_of(1), lambda value, num_rows: 1 // 0)),
    ):
        with pytest.raises(error):
            call()


def test_lists_of_parameters_are_compared_one_by_one():
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second]}]
    lists = _C.ParameterLists(groups)
    assert lists.are_same(groups)
    assert lists.are_same([{"params": [first]}, {"params": [second]}])
    assert not lists.are_same([{"params": [second]}, {"params": [first]}])
    assert not lists.are_same(groups[:1])
    groups[0]["params"].append(second)
    assert not lists.are_same(groups)
    groups[0]["params"].pop()
    assert lists.are_same(groups)
    groups[1]["params"][0] = torch.nn.Parameter(torch.zeros(2))
    assert not lists.are_same(groups)
