"""Parameter lists, compared in one call."""

import torch

from cpr_ext import _C


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
