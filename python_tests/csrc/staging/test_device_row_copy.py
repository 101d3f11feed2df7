"""csrc/staging/cuda/row_copy.h: whole rows out of a table on a device and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import CudaError, RowIndexError, UsageError
from python_tests.csrc import backends
from python_tests.csrc.backends import live_bytes
from python_tests.examples import examples

SLOT_BYTES = 64 * 1024
row_sizes = st.one_of(
    st.sampled_from([1, 2, 4, 6, 8, 16, 24, 48, 64, 100, 128, 256, 512, 1024, 4096]),
    st.integers(1, 4096),
)


@pytest.fixture(scope="module", params=backends.DEVICE_NAMES)
def device(request):
    return backends.find(request.param)


@pytest.fixture(scope="module")
def stager(device):
    return make_stager(device)


def make_stager(device, slot_bytes=SLOT_BYTES, num_slots=2):
    return device.native.DeviceStager(
        device=device.device, slot_bytes=slot_bytes, num_slots=num_slots
    )


def random_bytes(shape, seed):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@examples(60)
@given(
    num_rows=st.integers(1, 200),
    row_bytes=row_sizes,
    gap=st.sampled_from([0, 0, 1, 4, 16, 64]),
    count=st.integers(0, 300),
    seed=st.integers(0, 2**32),
)
def test_gather_is_numpy_indexing(device, stager, num_rows, row_bytes, gap, count, seed):
    whole = random_bytes((num_rows, row_bytes + gap), seed)
    row_ids = np.random.default_rng(seed + 1).integers(0, num_rows, count)
    out = np.zeros((count, row_bytes), np.uint8)
    stager.gather_rows(device.put(whole)[:, :row_bytes], row_ids, out)
    np.testing.assert_array_equal(out, whole[row_ids, :row_bytes])


@examples(60)
@given(
    num_rows=st.integers(1, 200),
    row_bytes=row_sizes,
    gap=st.sampled_from([0, 0, 1, 4, 16, 64]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_scatter_is_numpy_assignment_and_touches_no_other_byte(
    device, stager, num_rows, row_bytes, gap, share, seed
):
    whole = random_bytes((num_rows, row_bytes + gap), seed)
    row_ids = np.flatnonzero(np.random.default_rng(seed + 2).random(num_rows) < share)
    packed = random_bytes((len(row_ids), row_bytes), seed + 3)
    expected = whole.copy()
    expected[row_ids, :row_bytes] = packed
    on_device = device.put(whole)
    stager.scatter_rows(packed, row_ids, on_device[:, :row_bytes])
    np.testing.assert_array_equal(device.get(on_device), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "float64"])
@pytest.mark.parametrize("shape", [(40,), (40, 3), (40, 2, 5)])
def test_rows_of_any_dtype_and_shape_come_back_as_they_were(device, stager, dtype, shape):
    table = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    row_ids = np.array([0, 3, 4, 39])
    packed = np.zeros((4, *shape[1:]), dtype)
    stager.gather_rows(device.put(table), row_ids, packed)
    np.testing.assert_array_equal(packed, table[row_ids])


def test_rows_that_no_buffer_holds_together_go_in_rounds(device, stager):
    table = random_bytes((2000, 400), 0)  # 800 kB through buffers of 64 KiB
    row_ids = np.random.default_rng(1).permutation(2000)
    out = np.zeros_like(table)
    on_device = device.put(table)
    stager.gather_rows(on_device, row_ids, out)
    np.testing.assert_array_equal(out, table[row_ids])
    packed = random_bytes((2000, 400), 2)
    stager.scatter_rows(packed, row_ids, on_device)
    expected = np.empty_like(table)
    expected[row_ids] = packed
    np.testing.assert_array_equal(device.get(on_device), expected)


def test_a_row_larger_than_a_buffer_is_refused(device, stager):
    table = device.put(random_bytes((2, 2 * SLOT_BYTES), 0))
    with pytest.raises(UsageError, match=r"row of .* does not fit .*slot_bytes larger"):
        stager.gather_rows(table, np.array([1]), np.zeros((1, 2 * SLOT_BYTES), np.uint8))


def test_row_ids_are_checked_round_by_round(device, stager):
    """More rounds than there are buffers; a bad id in the last is told by its position."""
    rows = random_bytes((100, 4096), 3)
    table, row_ids = device.put(rows), np.arange(100).repeat(2)
    out = np.zeros((200, 4096), np.uint8)
    stager.gather_rows(table, row_ids, out)
    np.testing.assert_array_equal(out, rows[row_ids])
    row_ids[199] = 100
    with pytest.raises(RowIndexError, match=r"row_ids\[199\] is 100; the table has 100 rows"):
        stager.gather_rows(table, row_ids, out)
    before = device.get(table).copy()
    with pytest.raises(RowIndexError, match=r"row_ids\[199\]"):
        stager.scatter_rows(out + 1, row_ids, table)
    np.testing.assert_array_equal(device.get(table), before)  # of a scatter all are checked first


@pytest.mark.parametrize("bad", [-1, 10, 2**62])
def test_a_row_outside_the_table_is_refused(device, stager, bad):
    table, out = device.put(np.zeros((10, 2), np.float32)), np.zeros((1, 2), np.float32)
    with pytest.raises(RowIndexError, match=rf"row_ids\[0\] is {bad}"):
        stager.gather_rows(table, np.array([bad]), out)
    with pytest.raises(RowIndexError):
        stager.scatter_rows(out, np.array([bad]), table)


@pytest.mark.parametrize("number", [-1, 99])
def test_a_device_that_is_not_there_is_refused(device, number):
    with pytest.raises(UsageError, match=f"device is {number}; there are"):
        device.native.DeviceStager(device=number, slot_bytes=SLOT_BYTES, num_slots=2)


def test_where_memory_is_short_the_buffers_are_smaller(emulated):
    emulated.native.emulator.fail_call("cudaMalloc", 2)
    before = live_bytes(emulated)
    stager = make_stager(emulated, slot_bytes=8 * SLOT_BYTES)
    assert stager.slot_bytes == 4 * SLOT_BYTES
    table = random_bytes((3000, 256), 0)
    out = np.zeros_like(table)
    stager.gather_rows(table, np.arange(3000), out)
    np.testing.assert_array_equal(out, table)
    del stager
    assert live_bytes(emulated) == before


def test_where_there_is_no_memory_at_all_the_error_is_cudas_own(emulated):
    emulated.native.emulator.fail_call("cudaMalloc", 1)
    with pytest.raises(CudaError, match=r"error 2 \(out of memory\) at cudaMalloc.*device.cu:"):
        make_stager(emulated)


@pytest.mark.parametrize("call", ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaEventRecord"])
def test_a_call_that_fails_is_told_and_the_next_gather_is_right(emulated, call):
    table, row_ids = random_bytes((50, 64), 0), np.arange(50)
    out = np.zeros_like(table)
    stager = make_stager(emulated)
    emulated.native.emulator.fail_call(call, 1, 1)
    with pytest.raises(CudaError, match=r"invalid argument.*row_copy.cu:|device.h:"):
        stager.gather_rows(table, row_ids, out)
    stager.gather_rows(table, row_ids, out)
    np.testing.assert_array_equal(out, table)


def test_gathers_in_flight_do_not_disturb_each_other(emulated):
    """With every copy as late as it can be, buffers that are used again must wait for theirs."""
    emulated.native.emulator.set_lazy(True)
    stager = make_stager(emulated)
    table = random_bytes((4000, 128), 0)  # 8 rounds through two buffers
    out = np.zeros_like(table)
    stager.gather_rows(table, np.arange(4000), out)
    np.testing.assert_array_equal(out, table)


def test_small_gathers_share_a_buffer_and_wait_for_it_once(emulated):
    stager = make_stager(emulated)
    table = random_bytes((4000, 16), 0)
    stager.gather_rows(table, np.arange(10), np.zeros((10, 16), table.dtype))
    emulated.native.emulator.calls()
    for first in range(0, 80, 10):
        out = np.zeros((10, 16), table.dtype)
        stager.gather_rows(table, np.arange(first, first + 10), out)
        np.testing.assert_array_equal(out, table[first : first + 10])
    # The stream of copies waits for each gather, training's only for a buffer that is used again.
    assert emulated.native.emulator.calls()["cudaStreamWaitEvent"] == 8


@pytest.mark.parametrize("num_arrays", [1, 3, 40])
def test_chosen_rows_are_packed_on_their_device(device, num_arrays):
    counter = device.access_counter("t", 500)
    counter.observe(np.arange(0, 500, 3))
    chosen = counter.begin_select(0, 500, 100)
    row_ids = chosen.read()
    shapes = [(500, 1 + number % 7) for number in range(num_arrays)]
    arrays = [random_bytes(shape, number) for number, shape in enumerate(shapes)]
    on_device = [device.put(array) for array in arrays]
    outs = [device.put(np.zeros((100, columns), np.uint8)) for _, columns in shapes]
    device.native.gather_chosen(tables=on_device, chosen=chosen, outs=outs)
    device.native.StreamMark(device=device.device).wait()
    for array, out in zip(arrays, outs, strict=True):
        np.testing.assert_array_equal(device.get(out), array[row_ids])


def test_rows_that_no_array_has_are_not_packed(emulated):
    counter = emulated.access_counter("t", 50)
    counter.observe(np.arange(10))
    chosen = counter.begin_select(0, 50, 5)
    table, out = random_bytes((50, 4), 0), np.zeros((5, 4), np.uint8)

    def pack(tables, outs):
        emulated.native.gather_chosen(tables=tables, chosen=chosen, outs=outs)

    with pytest.raises(UsageError, match="hold 0 rows"):
        pack([table], [out])  # not read yet
    chosen.read()
    with pytest.raises(UsageError, match="chosen of 50; an array of the table has 49"):
        pack([table[:49]], [out])
    with pytest.raises(UsageError, match="hold 5 rows of 4 bytes"):
        pack([table], [out[:4]])
    with pytest.raises(UsageError, match="one array of outs per table"):
        pack([table], [])
    assert not out.any()


def test_gathers_that_share_a_buffer_and_scatters_keep_to_their_memory(emulated, tmp_path):
    """With every copy as late as it can be."""
    emulated.native.emulator.set_lazy(True)
    stager = make_stager(emulated)
    table = random_bytes((400, 100), 0)
    expected = table.copy()
    for first in range(0, 400, 40):
        ids = np.arange(first, first + 40)
        out = np.zeros_like(table[ids])
        stager.gather_rows(table, ids, out)
        np.testing.assert_array_equal(out, expected[ids])
        expected[ids] = expected[ids[::-1]]
        stager.scatter_rows(np.ascontiguousarray(out[::-1]), ids, table)
    np.testing.assert_array_equal(table, expected)
