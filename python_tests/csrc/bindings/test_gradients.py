"""Version counters and parameter lists, read in one call."""

import pytest
import torch

from cpr_ext import _C


def versions_of(*tables, states=None):
    versions = _C.TensorVersions(len(tables))
    for index, tensors in enumerate(tables):
        versions.set(index, list(tensors), states[index] if states else None)
    return versions


def values(versions, number):
    return [versions.values(index) for index in range(number)]


def test_a_write_is_seen_until_it_is_accepted():
    tensors = [torch.zeros(3) for _ in range(4)]
    tensors[3].add_(1)
    versions = versions_of(tensors[:1], tensors[1:3], tensors[3:])
    assert versions.are_same()
    assert values(versions, 3) == [[0], [0, 0], [1]]
    tensors[2].add_(1)
    assert not versions.are_same()
    assert values(versions, 3) == [[0], [0, 0], [1]]
    assert versions.accept([1])
    assert versions.are_same()
    assert values(versions, 3) == [[0], [0, 1], [1]]


def test_only_the_tables_that_are_named_are_accepted():
    tensors = [torch.zeros(3) for _ in range(3)]
    versions = versions_of(*([each] for each in tensors))
    for _ in range(20):
        for tensor in tensors:
            tensor.add_(1)
        assert versions.accept([0, 2])
    assert values(versions, 3) == [[20], [0], [20]]
    assert not versions.are_same()
    assert versions.accept([])
    assert not versions.are_same()
    versions.set(1, [torch.zeros(1), tensors[1]], None)
    assert versions.values(1) == [0, 20]
    assert versions.are_same()


def test_a_state_of_another_size_differs_and_nothing_is_accepted():
    weight, state = torch.zeros(3), {}
    versions = versions_of([torch.zeros(3)], [weight], states=[None, state])
    state["sum"] = torch.zeros(3)
    weight.add_(1)
    assert not versions.are_same()
    assert not versions.accept([0, 1])
    assert versions.values(1) == [0]
    assert versions.accept([0])
    versions.set(1, [weight, state["sum"]], state)
    assert versions.are_same()
    state.clear()
    assert not versions.are_same()


def test_mistakes_are_refused():
    with pytest.raises(IndexError):
        _C.TensorVersions(1).accept([1])
    with pytest.raises(IndexError):
        _C.TensorVersions(1).set(1, [], None)
    with pytest.raises(AttributeError, match="_version"):
        _C.TensorVersions(1).set(0, [1], None)
    with pytest.raises(TypeError, match="len"):
        _C.TensorVersions(1).set(0, [], 1)


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
