"""bfloat16 is known to torch only, so this file needs it; the others run without."""

import pytest

from python_tests.csrc import segments

if segments.SANITIZER:
    pytest.skip("torch's own threads are not for our sanitizers", allow_module_level=True)
torch = pytest.importorskip("torch")

from cpr_ext._native import native  # noqa: E402

pytestmark = pytest.mark.usefixtures("every_instruction_set")


@pytest.mark.parametrize("place", [0, 1, 2047, 2048, 4999])
def test_a_bfloat16_nan_is_found_where_it_lies(place):
    array = torch.randn(5000).to(torch.bfloat16)
    array[7] = float("inf")
    assert native.find_nan(array) == -1
    array[place] = float("nan")
    assert native.find_nan(array) == place


def test_every_bfloat16_bit_pattern_is_judged_as_torch_judges_it():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    nans = torch.isnan(every)
    assert native.find_nan(every[~nans]) == -1
    assert all(native.find_nan(one.reshape(1)) == 0 for one in every[nans])
