"""Trees of plain values and tensors come back as they were, or are refused by name."""

import json
import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.flatten import pack, unpack
from python_tests.helpers import assert_same, same_bits

NUMPY_DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    array = np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


names = (
    st.sampled_from(["a", "b", "a.b", "a.b.c", "0", "1", "$tensor", "$dict", "", "ü"]) | st.text()
)
keys = names | st.integers(-2, 2) | st.booleans() | st.none() | st.tuples(st.integers(0, 2), names)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors() | arrays()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def through_json(tree):
    skeleton, tensors = pack(tree, "root")
    return unpack(json.loads(json.dumps(skeleton)), {k: v.clone() for k, v in tensors.items()})


@given(trees)
def test_any_allowed_tree_comes_back_as_it_was(tree):
    assert_same(through_json(tree), tree)


def test_tensors_whose_paths_are_spelled_alike_stay_apart():
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 1: torch.ones(1), "1": np.zeros(2)}
    assert_same(through_json(tree), tree)


def test_numpy_scalars_come_back_as_the_python_values_they_equal():
    tree = [np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x")]
    back = through_json(tree)
    assert back == [0.5, 3, True, "x"]
    assert [type(value) for value in back] == [float, int, bool, str]


def test_tensors_are_detached_and_strides_do_not_matter():
    tensor = torch.arange(12.0, requires_grad=True).reshape(3, 4).T
    back = through_json([tensor, torch.zeros(()).expand(2, 2)])
    assert same_bits(back[0], tensor.detach())
    assert not back[0].requires_grad
    assert back[1].shape == (2, 2)


def test_subclasses_of_dict_and_tuple_come_back_as_plain_ones():
    pair = namedtuple("pair", "x y")
    assert through_json([OrderedDict(a=1), pair(1, 2)]) == [{"a": 1}, (1, 2)]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "root.x.1 is a object; allowed: None, bool"),
        (b"bytes", "root.x.1 is a bytes"),
        ({1, 2}, "root.x.1 is a set"),
        (1j, "root.x.1 is a complex"),
        (lambda: 0, "root.x.1 is a function"),
        (np.datetime64("2020-01-01"), "root.x.1 is a date"),
        (torch.zeros(2, dtype=torch.complex64), "root.x.1 is a tensor of torch.complex64"),
        (torch.zeros(2).to_sparse(), "root.x.1 is a tensor of torch.float32, torch.sparse_coo"),
        (np.array([object()]), "root.x.1 is an array of object"),
        (np.array(["text"]), "root.x.1 is an array of <U4"),
        (np.array([1], dtype=">i4"), "root.x.1 is an array of >i4"),
        (np.array([1j]), "root.x.1 is a tensor of torch.complex128"),
    ],
)
def test_other_types_are_refused_with_their_place(value, told):
    with pytest.raises(UsageError) as refusal:
        pack({"x": [0, value]}, "root")
    assert str(refusal.value).startswith(told)


def test_a_tree_that_names_a_missing_tensor_is_not_taken_for_whole():
    skeleton, _ = pack({"a": torch.zeros(2)}, "root")
    with pytest.raises(StoreError, match=r"'root.a' that is not in the file"):
        unpack(skeleton, {})
