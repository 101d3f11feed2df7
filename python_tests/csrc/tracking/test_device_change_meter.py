"""csrc/tracking/cuda/change_meter.h: what differs from ChangeMeter, which test_any_tracker.py
holds both to."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import CudaError, NanError, UsageError
from python_tests.csrc import backends
from python_tests.csrc.backends import live_bytes
from python_tests.examples import examples

DTYPES = [np.float16, np.float32, np.float64]


def host_meter(weight):
    return native.ChangeMeter(name="t", weight=weight)


@pytest.mark.emulated
@examples(40)
@given(
    num_rows=st.sampled_from([1, 31, 33, 200]),
    embedding_dim=st.sampled_from([1, 2, 7, 8, 9, 16, 33, 64]),
    padding=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]),
    seed=st.integers(0, 10_000),
)
def test_every_change_is_the_hosts_bit_for_bit(
    num_rows, embedding_dim, padding, dtype, spread, seed
):
    """Every budget chooses the same rows, ties included, so all changes order the same."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((num_rows, embedding_dim + padding)).astype(dtype)
    weight = weight[:, :embedding_dim]
    meters = host_meter(weight), backends.find("emulated").change_meter("t", weight)
    # Rows in pairs of nearly the same change: an order of summation of one's own would swap some.
    step = (random.standard_normal((num_rows, embedding_dim)) * spread).astype(dtype)
    step[1::2] = step[: len(step) // 2 * 2 : 2][:, ::-1]
    weight += step
    dirty = np.unique(random.integers(0, num_rows, num_rows))
    for meter in meters:
        meter.observe(dirty)
    for k in {1, 2, len(dirty) // 3, len(dirty) // 2, len(dirty) - 1}:
        chosen = [meter.select(0, num_rows, k, weight=weight).tolist() for meter in meters]
        assert chosen[0] == chosen[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_precision_number_is_read_as_on_the_host(emulated, dtype):
    import torch

    every = torch.arange(2**16).to(torch.uint16).view(getattr(torch, dtype)).reshape(-1, 16)
    every = every[every.isfinite().all(1)]
    start = torch.zeros_like(every)
    meters = host_meter(start), emulated.change_meter("t", start)
    for meter in meters:
        meter.observe(np.arange(len(every)))
    for k in (1, 100, 2000):
        chosen = [meter.select(0, len(every), k, weight=every) for meter in meters]
        np.testing.assert_array_equal(*chosen)


def test_infinities_are_changes_and_not_nan(device):
    weight = np.zeros((5, 9), dtype=np.float32)
    weight[0, 1] = weight[1, 1] = np.inf
    weight[2, 1] = np.nan
    meter = device.change_meter("t", weight)
    weight[0, 2] = 3  # its infinity has not moved: a change of 3
    weight[1, 1] = -np.inf
    weight[2, 1] = 0  # a NaN that is gone: as far as it gets
    weight[3, 1] = 4
    meter.observe(np.arange(5))
    assert meter.select(0, 5, 2, weight=weight).tolist() == [1, 2]
    assert meter.select(0, 5, 3, weight=weight).tolist() == [1, 2, 3]
    assert meter.select(0, 5, 4, weight=weight).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("embedding_dim", [1, 8, 19])
def test_nan_is_told_when_rows_are_read_and_nothing_of_its_row_is_lost(
    device, dtype, embedding_dim
):
    weight = np.zeros((600, embedding_dim), dtype=dtype)
    meter = device.change_meter("users", weight)
    meter.observe(np.arange(500))
    weight[:500] = 1
    weight[[400, 480], -1] = np.nan
    weight[550] = np.nan  # not dirty: not looked at
    pending = meter.begin_select(0, 600, 10, weight=weight)
    with pytest.raises(NanError, match="'users': row 400 holds NaN"):
        pending.read()
    taken = meter.take_range(0, 600, weight=weight)
    assert taken.num_rows == 498
    assert meter.dirty_rows().tolist() == [400, 480]
    assert meter.take(np.array([3, 400]), weight=weight).num_rows == 0
    weight[[400, 480], -1] = 3  # farther from 0, where they were last taken, than the others
    assert meter.select(0, 600, 5, weight=weight).tolist() == [400, 480]
    meter.observe(np.array([100]))
    weight[100] = 1000  # farther than they, whose change is no infinite one
    assert meter.select(0, 600, 1, weight=weight).tolist() == [100]
    weight[100] = 1
    meter.put_back(taken)
    assert meter.num_dirty() == 500
    assert meter.select(0, 600, 2, weight=weight).tolist() == [400, 480]


def test_a_failed_save_gives_rows_their_priority_back_every_time(device):
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = device.change_meter("t", weight)
    weight[0], weight[1] = 2, 3
    meter.observe(np.array([0, 1]))
    for _ in range(3):  # row 0 moves no more, but what was given back stays
        meter.put_back(meter.take_range(0, 4, weight=weight))
        meter.observe(np.array([2]))
        weight[2] += 0.5
        assert meter.select(0, 4, 1, weight=weight).tolist() == [1]
        assert meter.select(0, 4, 2, weight=weight).tolist() == [0, 1]
    meter.take_range(0, 4, weight=weight)
    meter.observe(np.array([0, 1, 2]))
    weight[2] += 0.1
    assert meter.select(0, 4, 1, weight=weight).tolist() == [2], "a taken row starts anew"


def test_what_two_failed_saves_took_of_a_row_is_added_up(device):
    weight = np.zeros((4, 1), dtype=np.float32)
    meter = device.change_meter("t", weight)
    taken = []
    for step in (3, 2):
        weight[0] += step
        meter.observe(np.array([0]))
        taken.append(meter.take_range(0, 4, weight=weight))
    for each in taken:
        meter.put_back(each)
    weight[1], weight[2] = 4, 6
    meter.observe(np.array([1, 2]))
    assert meter.select(0, 4, 1, weight=weight).tolist() == [2]
    assert meter.select(0, 4, 2, weight=weight).tolist() == [0, 2]


def test_the_weight_is_as_it_is_when_the_stream_gets_there(emulated):
    weight = np.zeros((8, 4), dtype=np.float32)
    meter = emulated.change_meter("t", weight)
    lookups = np.array([1, 2])
    emulated.native.emulator.set_lazy(True)
    meter.observe(lookups)
    bytes_ = emulated.native.emulator.submit_fill
    bytes_(weight[1].ctypes.data, 0x40, 16)  # an optimizer's step: row 1 is 3.0039
    before = meter.begin_select(0, 8, 1, weight=weight)
    taken = meter.take(np.array([1]), weight=weight)
    bytes_(weight[2].ctypes.data, 0x3F, 16)
    bytes_(weight[1].ctypes.data, 0x00, 16)
    lookups_later = np.array([1])
    meter.observe(lookups_later)
    asked = 0
    while not before.is_ready():
        asked += 1
    assert asked > 3
    assert before.read().tolist() == [1]
    assert taken.row_ids.tolist() == [1]
    assert meter.select(0, 8, 1, weight=weight).tolist() == [1], "it moved back by 3.0039"


def test_choosing_and_taking_wait_for_nothing(emulated):
    weight = np.zeros((1000, 4), dtype=np.float32)
    meter = emulated.change_meter("t", weight)
    lookups, row_ids = np.arange(500), np.arange(10, 20)
    emulated.native.emulator.set_lazy(True)
    emulated.native.emulator.calls()
    meter.observe(lookups)
    pending = meter.begin_select(0, 1000, 50, weight=weight)
    taken = [meter.take(row_ids, weight=weight), meter.take_range(400, 600, weight=weight)]
    calls = emulated.native.emulator.calls()
    assert "cudaStreamSynchronize" not in calls
    assert calls["cudaEventSynchronize"] == 1  # that of an upload's block, long free
    assert pending.read().tolist() == list(range(50))
    assert [t.num_rows for t in taken] == [10, 100]


@pytest.mark.parametrize("num_tables", [1, 26, 65])
def test_a_batch_of_many_tables_marks_table_by_table(device, num_tables):
    random = np.random.default_rng(num_tables)
    meters = [
        device.change_meter(f"t{i}", np.zeros((50 + i, 2), np.float32)) for i in range(num_tables)
    ]
    batch = [random.integers(0, 50, random.integers(0, 100)) for _ in meters]
    device.native.count_lookups([m.tracker for m in meters], [device.put(b) for b in batch])
    for meter, indices in zip(meters, batch, strict=True):
        assert meter.dirty_rows().tolist() == np.unique(indices).tolist()


def test_a_batch_of_26_tables_is_one_launch_and_allocates_nothing(emulated):
    weight = np.zeros((1000, 2), np.float32)
    meters = [emulated.change_meter(f"t{i}", weight).tracker for i in range(26)]
    batch = [np.arange(100) for _ in meters]
    emulated.native.emulator.calls()
    emulated.native.count_lookups(meters, batch)
    assert emulated.native.emulator.calls() == {"cudaLaunchKernelEx": 1}


def test_the_weight_is_required_and_must_be_the_same_table(device):
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = device.change_meter("t", weight)
    for call in (lambda: meter.select(0, 4, 1), lambda: meter.take_range(0, 4)):
        with pytest.raises(UsageError, match=r"'t'.*pass weight="):
            call()
    for other in (weight[:3], weight.astype(np.float64), np.zeros((4, 3), np.float32)):
        with pytest.raises(UsageError, match=r"'t'.*\(4, 2\)"):
            meter.begin_select(0, 4, 1, weight=other)
    with pytest.raises(UsageError, match="device is 99; there are"):
        device.native.DeviceChangeMeter(name="t", weight=device.put(weight), device=99)


def test_where_the_copy_finds_no_memory_its_size_and_the_remedy_are_told(emulated):
    weight = np.zeros((1000, 16), dtype=np.float16)
    before = live_bytes(emulated)
    emulated.native.emulator.calls()
    emulated.change_meter("t", weight)
    needed = emulated.native.emulator.calls()["cudaMalloc"]
    emulated.native.emulator.fail_call("cudaMalloc", needed)
    with pytest.raises(
        CudaError,
        match=r"'users': .* 1000 rows of 32 bytes, 32000 in all.*free so much.*out of memory",
    ):
        emulated.change_meter("users", weight)
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaMemsetAsync", "cudaLaunchKernelEx"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_no_meter_is_made_where_a_call_fails(emulated, call, nth):
    weight = np.zeros((100, 4), dtype=np.float32)
    before = live_bytes(emulated)
    emulated.native.emulator.calls()
    emulated.change_meter("t", weight)
    if nth > emulated.native.emulator.calls()[call]:
        return
    emulated.native.emulator.fail_call(call, nth)
    with pytest.raises(CudaError, match=r"out of memory\) at "):
        emulated.change_meter("t", weight)
    assert live_bytes(emulated) == before


@pytest.mark.parametrize("nth", range(1, 14))
@pytest.mark.parametrize(
    "call", ["cudaMallocFromPoolAsync", "cudaLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync"]
)
def test_a_call_that_fails_leaves_every_score_as_it_was(emulated, call, nth):
    weight = np.zeros((1000, 4), dtype=np.float32)
    meter = emulated.change_meter("t", weight)
    meter.observe(np.arange(200))
    weight[:200] = 1 + np.arange(200)[:, None] % 7
    chosen = meter.select(0, 1000, 60, weight=weight).tolist()
    for attempt in (
        lambda: meter.select(0, 1000, 20, weight=weight),
        lambda: meter.take(np.arange(100), weight=weight),
        lambda: meter.take_range(0, 100, weight=weight),
    ):
        emulated.native.emulator.fail_call(call, nth)
        result = None
        with contextlib.suppress(CudaError):  # not every call is made so often
            result = attempt()
        emulated.native.emulator.fail_call("", 0)
        if result is not None and not isinstance(result, np.ndarray):
            meter.put_back(result)
        assert meter.num_dirty() == 200
        assert meter.select(0, 1000, 60, weight=weight).tolist() == chosen


def test_memory_is_given_back(emulated):
    before = live_bytes(emulated)
    weight = np.zeros((10_000, 8), dtype=np.float32)
    meter = emulated.change_meter("t", weight)
    meter.observe(np.arange(3000))
    meter.put_back(meter.take_range(0, 10_000, weight=weight))
    meter.select(0, 10_000, 10, weight=weight)
    assert meter.memory_bytes() <= live_bytes(emulated) - before < meter.memory_bytes() + 100
    assert weight.nbytes + 40_000 <= meter.memory_bytes() < weight.nbytes + 40_000 + 1300
    del meter
    assert live_bytes(emulated) == before
