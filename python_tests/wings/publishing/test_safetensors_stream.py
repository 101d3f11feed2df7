"""Files for others: what the safetensors library reads of them."""

import pytest
import torch
from safetensors.torch import load_file

from cpr_ext.errors import UsageError
from cpr_ext.wings.publishing.safetensors_stream import TensorSpec, write_safetensors
from python_tests.helpers import same_bits


def write(path, tensor):
    specs = {"values": TensorSpec(tuple(tensor.shape), tensor.dtype)}
    write_safetensors(path, specs, lambda name: [tensor])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_the_library_reads_every_bit(tmp_path, dtype):
    tensor = torch.randn(3, 5).to(dtype)
    write(tmp_path / "file", tensor)
    assert same_bits(load_file(tmp_path / "file")["values"], tensor)


def test_a_dtype_that_it_lacks_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"'values' is of torch.complex128.*--format torch"):
        write(tmp_path / "file", torch.zeros(3, dtype=torch.complex128))
    assert not (tmp_path / "file").exists()
