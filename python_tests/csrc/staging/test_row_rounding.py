"""csrc/staging/row_rounding.h: float32 rows in fewer bits, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import RowIndexError, UsageError
from cpr_ext.state.precision import PRECISIONS, decode_rows, encode_rows, stored_row_bytes
from python_tests.examples import examples

pytestmark = pytest.mark.usefixtures("every_form_of_rounding")

ROUNDED = PRECISIONS[1:]
POOL = native.ThreadPool(num_threads=2)
# With a loop of their own, with a part of a vector at the end, odd ones, and less than a vector.
DIMS = (1, 3, 7, 8, 16, 17, 32, 33, 64, 80, 100, 128)
SPECIAL = np.float32(
    [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3.4e38, -3.4e38, 65504, 65520, 1e-5]
)


def rounded(table, row_ids, precision, pool=None):
    num_rows = len(table if row_ids is None else row_ids)
    stored = np.full((num_rows, stored_row_bytes(table.shape[1], precision)), 77, np.uint8)
    native.round_rows(table, row_ids, precision, stored, pool=pool)
    return stored


def table_of(kind: str, rows: int, dim: int, seed: int) -> np.ndarray:
    """Return (rows, dim) float32: of training, of any bits, or of values that are special."""
    generator = np.random.default_rng(seed)
    if kind == "bits":
        return generator.integers(0, 2**32, (rows, dim), np.uint32).view(np.float32)
    if kind == "special":
        return generator.choice(SPECIAL, (rows, dim))
    scale = 10.0 ** generator.integers(-8, 4, (rows, 1))
    return (generator.normal(size=(rows, dim)) * scale).astype(np.float32)


tables = st.builds(
    table_of,
    st.sampled_from(["training", "training", "bits", "special"]),
    st.integers(1, 60),
    st.sampled_from(DIMS),
    st.integers(0, 2**32),
)


@pytest.mark.parametrize("precision", ROUNDED)
def test_without_row_ids_all_rows_are_rounded(precision):
    table = table_of("special", 37, 17, 0)
    stored = rounded(table, np.arange(37), precision)
    np.testing.assert_array_equal(rounded(table, None, precision), stored)


@pytest.mark.parametrize("precision", ROUNDED)
@given(tables, st.integers(0, 2**32))
@examples(60)
def test_rows_are_rounded_as_the_reference_does(precision, table, seed):
    row_ids = np.random.default_rng(seed).integers(0, len(table), 40)
    stored = rounded(table, row_ids, precision)
    np.testing.assert_array_equal(stored, encode_rows(table[row_ids], precision))


@pytest.mark.parametrize("precision", ROUNDED)
@given(tables, st.floats(0, 1), st.integers(0, 2**32))
@examples(60)
def test_rounded_rows_are_restored_to_their_places_and_no_other(precision, table, share, seed):
    row_ids = np.flatnonzero(np.random.default_rng(seed).random(len(table)) < share)
    stored = encode_rows(table[row_ids], precision)
    target = np.full_like(table, 5)
    expected = target.copy()
    expected[row_ids] = decode_rows(stored, table.shape[1], precision)
    native.restore_rows(stored, row_ids, precision, target)
    np.testing.assert_array_equal(target.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dim", [16, 33, 64])
def test_values_half_a_step_from_their_levels_are_rounded_as_the_reference_does(dim):
    generator = np.random.default_rng(dim)
    extents = 10.0 ** generator.uniform(-7, 3, 20_000)
    steps = generator.integers(0, 255, (len(extents), dim)) + 0.5
    steps += generator.choice([0, 1e-6, -1e-6, 1e-5, -1e-4, 0.1, 0.5], (len(extents), dim))
    steps[:, 0], steps[:, 1] = 0, 255
    biases = extents * generator.choice([0, -0.5, -1, 1, 10, 1000], len(extents))
    table = (biases[:, None] + steps * extents[:, None] / 255).astype(np.float32)
    for precision in ROUNDED:
        stored = rounded(table, np.arange(len(table)), precision)
        np.testing.assert_array_equal(stored, encode_rows(table, precision))


@pytest.mark.parametrize("precision", ROUNDED)
def test_threads_round_and_restore_the_same_rows(precision):
    table = table_of("training", 30_000, 16, 1)
    row_ids = np.arange(len(table))
    alone, together = (rounded(table, row_ids, precision, pool) for pool in (None, POOL))
    np.testing.assert_array_equal(alone, together)
    back = np.empty_like(table)
    native.restore_rows(together, row_ids, precision, back, pool=POOL)
    np.testing.assert_array_equal(back, decode_rows(together, 16, precision))


def test_what_does_not_fit_is_refused():
    table, ids = np.zeros((4, 8), np.float32), np.arange(4)
    with pytest.raises(UsageError, match=r"precision is 'int4'; allowed: float32, float16, int8"):
        native.round_rows(table, ids, "int4", np.zeros((4, 16), np.uint8))
    with pytest.raises(UsageError, match=r"stored has shape \(4, 15\); needed: \(4, 16\)"):
        native.round_rows(table, ids, "int8", np.zeros((4, 15), np.uint8))
    with pytest.raises(UsageError, match="table is not float32"):
        native.round_rows(table.astype(np.float64), ids, "int8", np.zeros((4, 16), np.uint8))
    with pytest.raises(RowIndexError, match="the table has 4 rows"):
        native.round_rows(table, ids + 1, "int8", np.zeros((4, 16), np.uint8))
    with pytest.raises(UsageError, match="row_ids must ascend"):
        native.restore_rows(np.zeros((4, 16), np.uint8), ids[::-1].copy(), "int8", table)
