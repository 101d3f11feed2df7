"""Fingerprints: two values have the same only if they have the same bits, type and layout."""

import random

import numpy as np
import pytest
import torch

from cpr_ext.wings.proving.fingerprint import leaves, print_of, read_prints, write_prints

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([[0.0, 0.0]]), torch.tensor([[-0.0, -0.0]])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1.0078125, dtype=torch.bfloat16)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (1, True),
        (1, 1.0),
        ("a" * 300, "a" * 299 + "b"),
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    ],
)
def test_values_of_other_bits_differ(value, other):
    assert print_of(value).difference(print_of(other)) is not None


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
        (NAN, float("nan")),
        (random.Random(1), random.Random(1)),
        (np.float32(2), 2.0),
    ],
)
def test_values_of_the_same_bits_do_not_differ(value, other):
    assert print_of(value).difference(print_of(other)) is None


def test_the_first_row_that_differs_is_named():
    value = torch.zeros(100, 3)
    other = value.clone()
    other[[17, 40], 2] = 1e-30
    said = print_of(value).difference(print_of(other))
    assert said == "2 of 100 rows differ, the first is row 17"


def test_a_tree_has_a_print_for_each_value_and_returns_from_its_file(tmp_path):
    tree = {"a": [torch.eye(3), {"b": 2}], "c": list(range(100)), "d": object()}
    prints = dict(leaves("x", tree))
    assert [*prints] == ["x['a'][0]", "x['a'][1]['b']", "x['c']"]
    write_prints(tmp_path / "p.npz", prints)
    read = read_prints(tmp_path / "p.npz")
    assert all(prints[name].difference(read[name]) is None for name in prints)
    assert read.keys() == prints.keys()
