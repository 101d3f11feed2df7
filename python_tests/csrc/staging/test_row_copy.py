"""csrc/staging/row_copy.h and cuda/row_copy.h: whole rows out of a table and back."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import CudaError, RowIndexError, UsageError
from python_tests.csrc import backends
from python_tests.csrc.backends import live_bytes
from python_tests.examples import examples

SLOT_BYTES = 64 * 1024
POOLS = {threads: native.ThreadPool(num_threads=threads) for threads in (1, 3)}
# All sizes that have a copy of their own, their neighbours, and anything up to a page.
row_sizes = st.one_of(
    st.sampled_from([1, 2, 3, 4, 6, 7, 8, 9, 16, 24, 31, 32, 48, 63, 64, 65, 100, 128, 256, 512]),
    st.integers(1, 4096),
)
pools = st.sampled_from([None, *POOLS.values()])


class Copier:
    """Gathers and scatters where a backend has its tables, which ``put`` puts there."""

    def __init__(self, backend, slot_bytes=SLOT_BYTES):
        self.backend, self.put, self.get = backend, backend.put, backend.get
        self.stager = backend.stager(slot_bytes)

    def gather(self, table, row_ids, out, pool=None):
        options = {"stager": self.stager} if self.stager else {"pool": pool}
        self.backend.native.gather_rows(table, row_ids, out, **options)

    def scatter(self, packed, row_ids, table, pool=None):
        options = {"stager": self.stager} if self.stager else {"pool": pool}
        self.backend.native.scatter_rows(packed, row_ids, table, **options)


@pytest.fixture(scope="module", params=backends.NAMES)
def copier(request):
    return Copier(backends.find(request.param))


@pytest.fixture(scope="module", params=backends.DEVICE_NAMES)
def of_device(request):
    return Copier(backends.find(request.param))


def random_bytes(shape, seed):
    """Bytes whose first lies at a cache line, as torch's do; with an odd seed 16 bytes behind."""
    shift = 16 * (seed % 2)
    memory = torch.empty(max(1, int(np.prod(shape))) + shift, dtype=torch.uint8).numpy()
    assert memory.ctypes.data % 64 == 0
    found = memory[shift:][: int(np.prod(shape))].reshape(shape)
    found[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return found


@pytest.mark.usefixtures("every_instruction_set")
@examples(80)
@given(
    num_rows=st.integers(1, 400),
    row_bytes=row_sizes,
    gap=st.sampled_from([0, 0, 1, 4, 5, 16, 64]),
    count=st.integers(0, 700),
    share=st.floats(0, 1),
    pool=pools,
    seed=st.integers(0, 2**32),
)
def test_gather_is_numpy_indexing_and_scatter_assignment_of_no_other_byte(
    copier, num_rows, row_bytes, gap, count, share, pool, seed
):
    whole, random = random_bytes((num_rows, row_bytes + gap), seed), np.random.default_rng(seed)
    row_ids, out = random.integers(0, num_rows, count), np.zeros((count, row_bytes), np.uint8)
    target = copier.put(whole)
    copier.gather(target[:, :row_bytes], row_ids, out, pool)
    np.testing.assert_array_equal(out, whole[row_ids, :row_bytes])
    row_ids = np.flatnonzero(random.random(num_rows) < share)
    packed = random_bytes((len(row_ids), row_bytes), seed + 2)
    expected = whole.copy()
    expected[row_ids, :row_bytes] = packed
    copier.scatter(packed, row_ids, target[:, :row_bytes], pool)
    np.testing.assert_array_equal(copier.get(target), expected)


@pytest.mark.usefixtures("every_instruction_set")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("row_bytes", [4, 64, 100, 4096])
def test_inputs_of_many_tasks_are_cut_without_loss(row_bytes, num_threads):
    count, pool = 4_000_000 // row_bytes, POOLS[num_threads]
    table = random_bytes((count, row_bytes), 0)
    row_ids = np.random.default_rng(1).permutation(count)
    out = np.zeros_like(table)
    native.gather_rows(table, row_ids, out, pool=pool)
    np.testing.assert_array_equal(out, table[row_ids])
    ascending = np.flatnonzero(np.random.default_rng(2).random(count) < 0.9)
    back, expected = np.zeros_like(table), np.zeros_like(table)
    native.scatter_rows(np.ascontiguousarray(table[ascending]), ascending, back, pool=pool)
    expected[ascending] = table[ascending]
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("shape", [(40,), (40, 3), (40, 2, 5), (40, 1, 4, 1)])
def test_rows_of_any_dtype_and_shape_come_back_as_they_were(copier, shape):
    row_ids = np.array([0, 3, 4, 39])
    for dtype in ("float32", "float16", "int8", "bool", "int64"):
        table = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
        packed, back = np.zeros((4, *shape[1:]), dtype), copier.put(np.zeros(shape, dtype))
        copier.gather(copier.put(table), row_ids, packed)
        np.testing.assert_array_equal(packed, table[row_ids])
        copier.scatter(packed, row_ids, back)
        np.testing.assert_array_equal(copier.get(back)[row_ids], packed)


@pytest.mark.parametrize(("place", "bad"), [(0, -1), (1, 10), (4, 2**62), (4, -(2**63))])
def test_a_row_outside_the_table_is_refused_and_nothing_is_written(copier, place, bad):
    table, row_ids = copier.put(np.arange(20.0).reshape(10, 2)), np.array([0, 2, 4, 6, 8])
    row_ids[place] = bad
    for call in (
        lambda: copier.gather(table, row_ids, np.zeros((5, 2))),
        lambda: copier.scatter(np.zeros((5, 2)), row_ids, table),
    ):
        with pytest.raises(RowIndexError, match=rf"row_ids\[{place}\] is {bad}"):
            call()
    assert copier.get(table)[2, 0] == 4.0


def test_what_cannot_be_copied_is_refused():
    table, ids = np.zeros((10, 4)), np.arange(3)
    rows, read_only = np.ones((3, 4)), np.ones((3, 4))
    read_only.flags.writeable = False
    fixed = np.zeros((10, 4))
    fixed.flags.writeable = False
    gather, scatter = native.gather_rows, native.scatter_rows
    for call, arguments, words in [
        *((scatter, (rows, np.array(wrong), table), "ascend") for wrong in ([0, 3, 2], [2, 2, 3])),
        (gather, (table, ids, np.zeros((3, 5))), "packed has"),
        (gather, (table, ids, np.zeros((2, 4))), "packed has"),
        (gather, (table, ids, np.zeros((3, 8))[:, ::2]), "contiguous rows"),
        (gather, (table, ids + 5, table[:3]), "shares memory"),
        (scatter, (table[9:], np.array([0]), table), "shares memory"),
        (gather, (table, ids, read_only), "out is read-only"),
        (scatter, (rows, ids, fixed), "table is read-only"),
    ]:
        with pytest.raises(UsageError, match=words):
            call(*arguments)
    assert not table.any()


# --- on a device ---


def test_rows_that_no_buffer_holds_together_go_in_rounds(of_device):
    """A bad id in the last is told by its position."""
    table = random_bytes((2000, 400), 0)  # 800 kB through two buffers of 64 KiB
    row_ids = np.random.default_rng(1).permutation(2000)
    out, on_device = np.zeros_like(table), of_device.put(table)
    of_device.gather(on_device, row_ids, out)
    np.testing.assert_array_equal(out, table[row_ids])
    packed, expected = random_bytes((2000, 400), 2), np.empty_like(table)
    of_device.scatter(packed, row_ids, on_device)
    expected[row_ids] = packed
    np.testing.assert_array_equal(of_device.get(on_device), expected)
    row_ids[1999] = 2000
    with pytest.raises(RowIndexError, match=r"row_ids\[1999\] is 2000; the table has 2000 rows"):
        of_device.gather(on_device, row_ids, out)
    with pytest.raises(RowIndexError, match=r"row_ids\[1999\]"):
        of_device.scatter(out + 1, row_ids, on_device)
    np.testing.assert_array_equal(of_device.get(on_device), expected)  # all are checked first


def test_a_row_larger_than_a_buffer_and_a_device_that_is_not_there_are_refused(of_device):
    table = of_device.put(random_bytes((2, 2 * SLOT_BYTES), 0))
    with pytest.raises(UsageError, match=r"row of .* does not fit .*slot_bytes larger"):
        of_device.gather(table, np.array([1]), np.zeros((1, 2 * SLOT_BYTES), np.uint8))
    for number in (-1, 99):
        with pytest.raises(UsageError, match=f"device is {number}; there are"):
            of_device.backend.native.DeviceStager(device=number, slot_bytes=4096, num_slots=2)


def test_where_memory_is_short_the_buffers_are_smaller_and_with_none_the_error_is_cudas(emulated):
    before = live_bytes(emulated)
    emulated.native.emulator.fail_call("cudaMalloc", 1)
    with pytest.raises(CudaError, match=r"error 2 \(out of memory\) at cudaMalloc.*device.cu:"):
        Copier(emulated)
    emulated.native.emulator.fail_call("cudaMalloc", 2)
    copier = Copier(emulated, slot_bytes=8 * SLOT_BYTES)
    assert copier.stager.slot_bytes == 4 * SLOT_BYTES
    table = random_bytes((3000, 256), 0)
    out = np.zeros_like(table)
    copier.gather(table, np.arange(3000), out)
    np.testing.assert_array_equal(out, table)
    del copier
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("call", ["cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaEventRecord"])
def test_a_call_that_fails_is_told_and_the_next_gather_is_right(emulated, call):
    table, row_ids = random_bytes((50, 64), 0), np.arange(50)
    out, copier = np.zeros_like(table), Copier(emulated)
    emulated.native.emulator.fail_call(call, 1, 1)
    with pytest.raises(CudaError, match=r"invalid argument.*row_copy.cu:|device.h:"):
        copier.gather(table, row_ids, out)
    copier.gather(table, row_ids, out)
    np.testing.assert_array_equal(out, table)


def test_gathers_that_share_a_buffer_and_scatters_keep_to_their_memory(emulated):
    """With every copy as late as it can be, buffers that are used again must wait for theirs."""
    emulated.native.emulator.set_lazy(True)
    copier = Copier(emulated)
    table = random_bytes((4000, 128), 0)  # 8 rounds through two buffers
    out = np.zeros_like(table)
    copier.gather(table, np.arange(4000), out)
    np.testing.assert_array_equal(out, table)
    expected = table.copy()
    for first in range(0, 400, 40):
        ids = np.arange(first, first + 40)
        out = np.zeros_like(table[ids])
        copier.gather(table, ids, out)
        np.testing.assert_array_equal(out, expected[ids])
        expected[ids] = expected[ids[::-1]]
        copier.scatter(np.ascontiguousarray(out[::-1]), ids, table)
    np.testing.assert_array_equal(table, expected)


def test_small_gathers_share_a_buffer_and_wait_for_it_once(emulated):
    copier = Copier(emulated)
    table = random_bytes((4000, 16), 0)
    copier.gather(table, np.arange(10), np.zeros((10, 16), table.dtype))
    emulated.native.emulator.calls()
    for first in range(0, 80, 10):
        out = np.zeros((10, 16), table.dtype)
        copier.gather(table, np.arange(first, first + 10), out)
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
    for number, (tables, outs, words) in enumerate(
        [
            ([table], [out], "hold 0 rows"),  # not read yet
            ([table[:49]], [out], "chosen of 50; an array of the table has 49"),
            ([table], [out[:4]], "hold 5 rows of 4 bytes"),
            ([table], [], "one array of outs per table"),
        ]
    ):
        if number == 1:
            chosen.read()
        with pytest.raises(UsageError, match=words):
            emulated.native.gather_chosen(tables=tables, chosen=chosen, outs=outs)
    assert not out.any()
