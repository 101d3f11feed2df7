"""Precisions of rows: their bytes, their bound, and FBGEMM's layout."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.state.precision import (
    PRECISIONS,
    Precision,
    decode_rows,
    encode_rows,
    fits,
    precision_of_row,
    round_rows,
    stored_row_bytes,
)

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


def test_a_precision_that_there_is_not_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match=r"Precision.base is 'int2'; allowed: float32, float16"):
        Precision(base="int2")
    with pytest.raises(UsageError, match=r"Precision.partial is None"):
        Precision(partial=None)  # type: ignore[arg-type]


def test_optimizer_state_is_not_kept_in_few_levels():
    with pytest.raises(UsageError, match=r"optimizers divide.*allowed: float32, float16, bfloat16"):
        Precision(state="int8")


def test_precisions_of_base_and_partial_snapshots_differ():
    precision = Precision(base="float16", partial="int4")
    assert (precision.of_weights("base"), precision.of_weights("partial")) == ("float16", "int4")
    assert not precision.is_exact
    assert Precision().is_exact


@pytest.mark.parametrize(
    ("precision", "sizes"),
    [("float32", (64, 4)), ("float16", (32, 2)), ("int8", (24, 9)), ("int4", (12, 5))],
)
def test_rows_have_the_bytes_of_fbgemms_layout(precision, sizes):
    assert (stored_row_bytes(16, precision), stored_row_bytes(1, precision)) == sizes


def test_rows_that_would_not_get_smaller_stay_float32():
    assert [precision_of_row(n, "int8") for n in (1, 2, 3)] == ["float32", "float32", "int8"]
    assert torch.equal(round_rows(torch.tensor([[0.1]]), "int4"), torch.tensor([[0.1]]))


@pytest.mark.parametrize("precision", ROUNDED)
def test_rows_of_training_are_rounded_within_the_bound(precision):
    rows = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    rounded = round_rows(rows, precision)
    changed = (rounded != rows).any(1)
    assert changed.float().mean() > 0.98  # few rows break the bound
    kept = within_the_bound(rows.numpy()[changed], rounded.numpy()[changed], precision)
    assert kept.all()


def within_the_bound(rows: np.ndarray, rounded: np.ndarray, precision: str) -> np.ndarray:
    """Return (n,) bool, in arithmetic that rounds nothing that matters."""
    exact = rows.astype(np.float64)
    levels = {"int8": 255, "int4": 15}.get(precision)
    if levels:
        bound = (exact.max(1) - exact.min(1)) / (2 * levels)
    else:
        bound = np.abs(exact).max(1) * (2.0**-11 if precision == "float16" else 2.0**-8)
    return (np.abs(exact - rounded).max(1) <= bound) & np.isfinite(exact).all(1)


@pytest.mark.parametrize("precision", ROUNDED)
@given(data=st.data())
@settings(max_examples=60)
def test_rows_of_any_bits_are_within_the_bound_or_unchanged(precision, data):
    rows = data.draw(rows_of_any_bits(data.draw(st.sampled_from((3, 8, 17)))))
    rounded = round_rows(torch.from_numpy(rows), precision).numpy()
    same = (rounded.view(np.uint32) == rows.view(np.uint32)).all(1)
    with np.errstate(all="ignore"):
        assert (same | within_the_bound(rows, rounded, precision)).all()
    assert same[~np.isfinite(rows).all(1)].all()


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        ([1.0, np.inf, 0.0, 0.0], "int8"),
        ([1.0, np.nan, 0.0, 0.0], "float16"),
        ([1.0, 70000.0, 0.0, 0.0], "float16"),
        ([3e38, -3e38, 0.0, 0.0], "int8"),
        ([1e-44, 3e-44, 2e-44, 0.0], "int8"),
        ([1e-7, 2e-7, 1.3e-7, 0.0], "int4"),
        ([1e-9, 2e-9, 1.3e-9, 0.0], "float16"),
    ],
)
def test_rows_that_break_the_bound_stay_as_they_are(row, precision):
    rows = torch.tensor([row])
    assert torch.equal(round_rows(rows, precision).view(torch.int32), rows.view(torch.int32))


def test_rows_of_a_new_table_fit_in_int8_although_fbgemms_epsilon_breaks_the_bound():
    rows = torch.empty(1000, 64).uniform_(-1e-4, 1e-4, generator=torch.Generator().manual_seed(1))
    _, kept = encode_rows(rows.numpy(), "int8")
    assert kept.mean() > 0.99


@pytest.mark.parametrize("elements", [4, 16, 60])
def test_the_bytes_are_those_of_fbgemm(elements):
    pytest.importorskip("fbgemm_gpu")
    rows = torch.randn(2000, elements) * torch.rand(2000, 1)
    ops = torch.ops.fbgemm
    for precision, theirs in (
        ("int8", ops.FloatToFused8BitRowwiseQuantized(rows)),
        ("int4", ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)),
    ):
        good = fits(rows.numpy(), decode_rows(theirs.numpy(), elements, precision), precision)
        stored, kept = encode_rows(rows.numpy(), precision)
        assert good.mean() > 0.98
        assert kept[good].all()
        np.testing.assert_array_equal(stored[good], theirs.numpy()[good])


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def distance(value: np.float32, exact: Fraction) -> Fraction:
    return abs(Fraction(float(value)) - exact)


@given(st.integers(0, 255), finite, finite)
@example(1, 2.0**60, -1.0)  # a sum that float64 rounds
@example(3, 1.195499e36 / 255, -1.295e18)
@settings(max_examples=300, deadline=None)
def test_a_value_of_int8_is_its_exact_sum_rounded_once(level, scale, bias):
    ends = np.float32([[scale, bias]])
    stored = np.concatenate([np.uint8([[level]]), ends.view(np.uint8)], 1)
    found = decode_rows(stored, 1, "int8")[0, 0]
    exact = level * Fraction(float(ends[0, 0])) + Fraction(float(ends[0, 1]))
    if abs(exact) >= 2**128 - 2**103:
        assert np.isinf(found)
        return
    for neighbour in np.nextafter(found, np.float32([-np.inf, np.inf])):
        if not np.isfinite(neighbour):
            continue
        nearer = distance(found, exact) - distance(neighbour, exact)
        assert nearer < 0 or (nearer == 0 and found.view(np.uint32) % 2 == 0)
