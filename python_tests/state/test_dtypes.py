"""The dtypes that a store can hold: safetensors knows each by the same name."""

import pytest
import torch
from safetensors.torch import load, save

from cpr_ext.state.dtypes import DTYPE_NAMES, DTYPES


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_safetensors_writes_the_same_name(dtype):
    data = save({"x": torch.zeros(2, dtype=dtype)})
    assert f'"dtype":"{DTYPE_NAMES[dtype]}"'.encode() in data
    assert load(data)["x"].dtype == dtype


def test_names_lead_back_to_dtypes():
    assert {DTYPES[name] for name in DTYPE_NAMES.values()} == set(DTYPE_NAMES)
