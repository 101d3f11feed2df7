"""The dense part on its way from one worker to another."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.distributed.collective.collectives import flatten, unflatten
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.dtypes import DTYPE_NAMES
from python_tests.helpers import same_bits

SHAPES = st.lists(st.integers(0, 3), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(list(DTYPE_NAMES)), SHAPES), max_size=6), st.integers(0))
def test_every_bit_of_every_tensor_arrives_as_json_and_bytes(kinds, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    tensors = {}
    for number, (dtype, shape) in enumerate(kinds):
        size = torch.empty(shape, dtype=dtype).nbytes
        bits = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=generator)
        tensors[f"tensor {number}"] = bits.view(dtype).view(shape)
    arrived = unflatten(*flatten(DensePart({"a": [1, None, "x"]}, tensors)))
    assert arrived.skeleton == {"a": [1, None, "x"]}
    assert list(arrived.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert same_bits(arrived.tensors[name], tensor)
