"""Version counters and parameter lists, read in one call."""

import pytest
import torch

from cpr_ext import _C
from cpr_ext.errors import UsageError


def versions_of(*tensors, tables=None):
    tables = range(len(tensors)) if tables is None else tables
    return _C.TensorVersions(list(tensors), list(tables), [t._version for t in tensors])


def test_a_write_is_seen_until_it_is_accepted():
    tensors = [torch.zeros(3) for _ in range(3)]
    versions = versions_of(*tensors)
    assert versions.are_same()
    assert versions.are_same(unsteady_only=True)
    tensors[1].add_(1)
    assert not versions.are_same()
    assert not versions.are_same(unsteady_only=True)
    assert versions.values() == [0, 0, 0]
    versions.accept()
    assert versions.are_same()
    assert versions.values() == [0, 1, 0]


def train(versions, tensors, writes, steps, stepped):
    for _ in range(steps):
        for tensor, number in zip(tensors, writes, strict=True):
            for _ in range(number):
                tensor.add_(1)
        versions.accept_step(stepped)


def test_steps_that_write_alike_are_counted():
    tensors = [torch.zeros(3) for _ in range(3)]
    versions = versions_of(*tensors, tables=[0, 0, 1])
    train(versions, tensors, [1, 2, 0], 5, [0])
    assert versions.values() == [5, 10, 0]
    assert versions.are_same()
    tensors[0].add_(1)  # outside of a step
    assert versions.are_same(unsteady_only=True)  # not read
    assert not versions.are_same()
    train(versions, tensors, [1, 2, 0], 3, [0])
    assert not versions.are_same()  # it stays so until it is accepted
    versions.accept()
    assert versions.are_same()
    train(versions, tensors, [1, 2, 0], 1, [0])
    assert versions.are_same()


def test_a_tensor_that_is_written_now_more_and_now_less_is_read_each_time():
    tensor = torch.zeros(3)
    versions = versions_of(tensor)
    for step in range(30):
        train(versions, [tensor], [1 + (step % 3 == 0)], 1, [0])
        assert versions.are_same()
    tensor.add_(1)
    assert not versions.are_same(unsteady_only=True)


def test_tables_that_did_not_step_are_not_accepted():
    tensors = [torch.zeros(3) for _ in range(2)]
    versions = versions_of(*tensors)
    train(versions, tensors, [1, 1], 6, [0])
    assert versions.values() == [6, 0]
    assert not versions.are_same()


def test_each_tensor_has_a_version():
    with pytest.raises(UsageError, match="1 tensors, 1 tables and 0 versions"):
        _C.TensorVersions([torch.zeros(1)], [0], [])


def test_parameters_are_compared_one_by_one():
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
