"""Trees of plain values and tensors come back as they were, or are refused by name."""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.state.dense_schema import pack, unpack
from cpr_ext.state.dtypes import DTYPE_NAMES
from python_tests.helpers import assert_same

NUMPY_DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8", "c16"]
BITS = [torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from([*DTYPE_NAMES, *BITS]))
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


@st.composite
def scalars(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    data = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    return np.frombuffer(bytes([data[0] & 1]) if dtype.kind == "b" else data, dtype)[0]


names = (
    st.sampled_from(["a", "b", "a.b", "a.b.c", "0", "1", "$tensor", "$dict", "", "ü"]) | st.text()
)
keys = names | st.integers(-2, 2) | st.booleans() | st.none() | st.floats()
keys |= st.tuples(st.integers(0, 2), names)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors() | arrays()
leaves |= scalars()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


def through_json(tree):
    skeleton, tensors = pack(tree, "root")
    return unpack(json.loads(json.dumps(skeleton)), {k: v.clone() for k, v in tensors.items()})


def bits_of(tree):
    """A tree of the types and the bits of a tree."""
    kind = type(tree)
    if kind in (dict, OrderedDict, Counter):
        return kind, [(bits_of(key), bits_of(value)) for key, value in tree.items()]
    if kind in (list, tuple):
        return kind, [bits_of(item) for item in tree]
    if kind is float:
        return kind, struct.pack("<d", tree)
    if kind is torch.Tensor:
        values = tree.reshape(-1).view(torch.uint8) if tree.numel() else torch.zeros(0)
        return kind, tree.dtype, tree.shape, values.numpy().tobytes()
    if isinstance(tree, np.ndarray | np.generic):
        return kind, tree.dtype, tree.shape, tree.tobytes()
    return kind, tree


@given(trees)
def test_any_allowed_tree_comes_back_in_type_and_bits(tree):
    assert bits_of(through_json(tree)) == bits_of(tree)


def test_tensors_whose_paths_are_spelled_alike_stay_apart():
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 1: torch.ones(1), "1": np.zeros(2)}
    assert_same(through_json(tree), tree)


class Phase(str, Enum):
    WARM = "warm"


class Level(IntEnum):
    LOW = 1


def deep(levels):
    return [deep(levels - 1)] if levels else 0


def endless():
    tree = []
    tree.append(tree)
    return tree


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "root.x.1 is a object; allowed: None, bool"),
        (b"bytes", "root.x.1 is a bytes"),
        ({1, 2}, "root.x.1 is a set"),
        (1j, "root.x.1 is a complex"),
        (lambda: 0, "root.x.1 is a function"),
        (np.datetime64("2020-01-01"), "root.x.1 is of numpy's datetime64[D]"),
        (Phase.WARM, "root.x.1 is a Phase; allowed"),
        (Level.LOW, "root.x.1 is a Level; allowed"),
        (namedtuple("Pair", "x y")(1, 2), "root.x.1 is a Pair; allowed"),
        (defaultdict(int, {"a": 1}), "root.x.1 is a defaultdict; allowed"),
        (torch.Size([1, 2]), "root.x.1 is a Size; allowed"),
        (torch.nn.Parameter(torch.zeros(2)), "root.x.1 is a Parameter; allowed"),
        (np.ma.array([1]), "root.x.1 is a MaskedArray; allowed"),
        ({Phase.WARM: 1}, "root.x.1 has a key <Phase.WARM: 'warm'> of type Phase"),
        ("\udc80", "root.x.1: '\\udc80' is no text"),
        ({"\udc80": 1}, "root.x.1: '\\udc80' is no text"),
        (deep(120), "root.x.1.0.0.0"),
        (endless(), "root.x.1.0.0.0"),
        (torch.zeros(2).to_sparse(), "root.x.1 is a tensor of torch.float32, torch.sparse_coo"),
        (np.array([object()]), "root.x.1 is of numpy's object"),
        (np.array(["text"]), "root.x.1 is of numpy's <U4"),
        (np.array([1], dtype=">i4"), "root.x.1 is of numpy's >i4"),
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
