"""Precisions of rows: their bytes, and their bound, which holds whatever a row has."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.state.precision import PRECISIONS, Precision, precision_of_row
from python_tests.rounding import bound, decode_rows, encode_rows, round_rows

ROUNDED = PRECISIONS[1:]


def rows_of_any_bits(elements: int) -> st.SearchStrategy[np.ndarray]:
    """Return rows of float32 whose bits are anything."""
    return st.binary(min_size=4 * elements, max_size=40 * elements).map(
        lambda data: (
            np.frombuffer(data[: len(data) // (4 * elements) * 4 * elements], np.float32)
            .reshape(-1, elements)
            .copy()
        )
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"base": "int4"}, r"Precision.base is 'int4'; allowed: float32, float16, i"),
        ({"partial": None}, r"Precision.partial is None"),
        ({"state": "int8"}, r"optimizers divide.*allowed: float32, float16$"),
    ],
)
def test_a_precision_that_there_is_not_is_refused_with_those_there_are(options, told):
    with pytest.raises(UsageError, match=told):
        Precision(**options)


def test_rows_that_would_not_get_smaller_stay_float32():
    assert [precision_of_row(n, "int8") for n in (1, 2, 3)] == ["float32", "float32", "int8"]
    assert torch.equal(round_rows(torch.tensor([[0.1]]), "int8"), torch.tensor([[0.1]]))


def check_bound(rows: np.ndarray, precision: str) -> None:
    stored = encode_rows(rows, precision)
    rounded = decode_rows(stored, rows.shape[1], precision)
    limits = bound(rows, precision)
    lost = np.isnan(limits)
    assert np.isnan(rounded[lost]).all()
    errors = np.abs(rows[~lost].astype(np.float64) - rounded[~lost])
    assert (errors <= limits[~lost, None]).all()


@pytest.mark.parametrize("precision", ROUNDED)
@given(data=st.data())
@settings(max_examples=100)
def test_rows_of_any_bits_are_within_the_bound(precision, data):
    check_bound(data.draw(rows_of_any_bits(data.draw(st.sampled_from((3, 8, 17))))), precision)


@pytest.mark.parametrize("elements", [4, 16, 60])
def test_int8_is_the_layout_of_fbgemm(elements):
    pytest.importorskip("fbgemm_gpu")
    rows = torch.randn(2000, elements)
    restored = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(
        torch.from_numpy(encode_rows(rows.numpy(), "int8"))
    )
    assert torch.allclose(restored, round_rows(rows, "int8"), rtol=1e-6, atol=1e-6)
