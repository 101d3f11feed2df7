"""csrc/staging/cuda/row_rounding.h: a device rounds rows to the bytes that the CPU does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import CudaError, RowIndexError, UsageError
from cpr_ext.state.precision import PRECISIONS, decode_rows, encode_rows, stored_row_bytes
from python_tests.csrc import backends
from python_tests.csrc.staging.test_row_rounding import DIMS, SPECIAL, table_of
from python_tests.examples import examples

ROUNDED = PRECISIONS[1:]
#: As on the CPU, and rows of more elements than the lanes of a warp take at once, which is 128.
DEVICE_DIMS = (*DIMS, 131, 300, 512)
SLOT_BYTES = 64 * 1024


@pytest.fixture(scope="module", params=backends.DEVICE_NAMES)
def device(request):
    return backends.find(request.param)


@pytest.fixture(scope="module")
def stager(device):
    return make_stager(device)


def make_stager(device, slot_bytes=SLOT_BYTES):
    return device.native.DeviceStager(device=device.device, slot_bytes=slot_bytes, num_slots=2)


def check_rounding(stager, on_device, table, row_ids, precision):
    """The bytes are those of the specification."""
    stored = np.full((len(row_ids), stored_row_bytes(table.shape[1], precision)), 77, np.uint8)
    stager.round_rows(on_device, row_ids, precision, stored)
    np.testing.assert_array_equal(stored, encode_rows(table[row_ids], precision))


def kinds_of(dim, seed):
    """Rows of training, of any bits, of special values, of tiny ranges, and with subnormals."""
    tables = [table_of(kind, 12, dim, seed) for kind in ("training", "bits", "special")]
    random = np.random.default_rng(seed)
    tiny = (1 + random.random((8, dim)) * 10.0 ** random.integers(-9, -3, (8, 1))).astype("f4")
    subnormal = random.integers(0, 1 << 20, (4, dim), np.uint32).view(np.float32)
    same = np.repeat(random.choice(SPECIAL, (6, 1)), dim, 1)
    return np.concatenate([*tables, tiny, subnormal, same])


@pytest.mark.parametrize("precision", ROUNDED)
@given(dim=st.sampled_from(DEVICE_DIMS), seed=st.integers(0, 2**32))
@examples(25)
def test_rows_are_rounded_to_the_bytes_of_the_specification(device, stager, precision, dim, seed):
    table = kinds_of(dim, seed)
    row_ids = np.random.default_rng(seed).permutation(len(table))
    check_rounding(stager, device.put(table), table, row_ids, precision)


@pytest.mark.parametrize("precision", ROUNDED)
@given(
    dim=st.sampled_from(DEVICE_DIMS),
    gap=st.sampled_from([0, 1, 4]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@examples(25)
def test_rounded_rows_come_back_at_their_places_and_no_other_is_touched(
    device, stager, precision, dim, gap, share, seed
):
    table = table_of("training", 40, dim, seed)
    row_ids = np.flatnonzero(np.random.default_rng(seed).random(40) < share)
    stored = encode_rows(table[row_ids], precision)
    whole = np.full((40, dim + gap), 5, np.float32)
    expected = whole.copy()
    expected[row_ids, :dim] = decode_rows(stored, dim, precision)
    on_device = device.put(whole)
    stager.restore_rows(stored, row_ids, precision, on_device[:, :dim])
    found = device.get(on_device)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize(("columns", "first"), [(17, 0), (17, 1), (20, 0), (20, 1)])
def test_rows_may_begin_at_any_float(device, stager, precision, columns, first):
    """Four elements at once are read only where every row allows it."""
    whole = np.random.default_rng(5).standard_normal((60, columns)).astype(np.float32)
    table = whole[:, first : first + 16]
    check_rounding(
        stager, device.put(whole)[:, first : first + 16], table, np.arange(60), precision
    )


def test_rows_that_no_buffer_holds_together_are_rounded_in_rounds(emulated):
    emulated.native.emulator.set_lazy(True)
    stager = make_stager(emulated, slot_bytes=4096)
    table = table_of("training", 900, 16, 3)
    table[::7, 2] = np.inf
    row_ids = np.random.default_rng(1).permutation(900)
    for precision in ROUNDED:
        check_rounding(stager, table, table, row_ids, precision)
        stored = encode_rows(table, precision)
        target = np.empty_like(table)
        stager.restore_rows(stored, row_ids, precision, target)
        np.testing.assert_array_equal(target[row_ids], decode_rows(stored, 16, precision))


@pytest.mark.parametrize("call", ["cudaLaunchKernelEx", "cudaMemcpyAsync"])
def test_a_call_that_fails_is_told_and_the_next_rounding_is_right(emulated, call):
    stager = make_stager(emulated)
    table = table_of("training", 30, 16, 4)
    emulated.native.emulator.fail_call(call, 1, 1)
    with pytest.raises(CudaError, match="invalid argument"):
        check_rounding(stager, table, table, np.arange(30), "int8")
    check_rounding(stager, table, table, np.arange(30), "int8")


def test_what_does_not_fit_is_refused(device, stager):
    table, ids = device.put(np.zeros((4, 8), np.float32)), np.arange(4)
    stored = np.zeros((4, 16), np.uint8)
    with pytest.raises(UsageError, match=r"packed has 60 bytes; needed are 4 .* rows of 16"):
        stager.round_rows(table, ids, "int8", stored[:, :15].copy())
    with pytest.raises(UsageError, match="float32 rows are not rounded"):
        stager.round_rows(table, ids, "float32", np.zeros((4, 32), np.uint8))
    with pytest.raises(UsageError, match="table is not float32"):
        stager.round_rows(device.put(np.zeros((4, 8))), ids, "int8", stored)
    with pytest.raises(RowIndexError, match="the table has 4 rows"):
        stager.restore_rows(stored, ids + 1, "int8", table)
