"""csrc/core/cuda/: memory, devices and copies, on the emulated device."""

from dataclasses import replace

import numpy as np
import pytest

from cpr_ext.errors import CudaError, UsageError
from python_tests.csrc.backends import KINDS

NUM_ROWS = 3000


@pytest.fixture
def reclaimed(emulated):
    """Devices for which memory was reclaimed; ``answer`` says whether there was any."""
    answer, devices = [True], []

    def reclaim(device):
        devices.append(device)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    emulated.native.set_memory_reclaimer(reclaim)
    yield answer, devices
    emulated.native.set_memory_reclaimer(lambda device: False)


def save_some_rows(counter):
    counter.observe(np.arange(0, NUM_ROWS, 3))
    row_ids = counter.select(0, NUM_ROWS, 100)
    return counter.take(row_ids)


def test_memory_is_mapped_once_and_given_back_on_request_or_if_the_device_has_little(emulated):
    emulator = emulated.native.emulator
    emulated.native.trim_memory(0)
    before = emulator.pooled_bytes()
    counter = emulated.access_counter("t", NUM_ROWS)
    for number in range(4):  # however often training waits for the device
        taken = save_some_rows(counter)
        emulator.synchronize()
        assert (emulator.mappings() == 0) == (number > 1)  # two are taken at once
    emulated.native.trim_memory(0)
    assert emulator.pooled_bytes() > before
    counter.put_back(taken)
    del taken
    for part, is_short in ((0.5, False), (0.01, True)):
        kept = emulator.pooled_bytes()
        emulator.set_free_part(part)
        emulated.native.trim_memory_if_short(0)
        assert (emulator.pooled_bytes() < kept) == is_short
    emulator.set_free_part(1.0)
    emulated.native.trim_memory(0)
    assert emulator.pooled_bytes() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_allocation_is_tried_again_once_memory_was_reclaimed(emulated, reclaimed):
    answer, devices = reclaimed
    for number, call in enumerate(("cudaMalloc", "cudaMallocFromPoolAsync"), 1):
        emulated.native.emulator.fail_call(call, 1)
        save_some_rows(emulated.access_counter("t", NUM_ROWS))
        assert devices == [0] * number
    for answer[0] in (False, ValueError("not that of the allocation")):
        emulated.native.trim_memory(0)
        emulated.native.emulator.fail_call("cudaMalloc", 1)
        with pytest.raises(CudaError, match="out of memory"):
            emulated.access_counter("t", NUM_ROWS)
    answer[0] = False
    save_some_rows(emulated.access_counter("t", NUM_ROWS))
    emulated.native.emulator.fail_call("cudaMalloc", 1)
    emulated.access_counter("u", NUM_ROWS)  # of what a pool keeps


def test_a_download_waits_for_no_upload(emulated):
    emulator = emulated.native.emulator
    counter = emulated.access_counter("t", NUM_ROWS)
    counter.observe(np.arange(100))
    emulator.set_lazy(True)
    pending = counter.begin_select(0, NUM_ROWS, 10)
    while not pending.is_ready():
        pass
    assert emulator.num_waiting() == 0
    counter.take(np.arange(100))  # whose row ids go up
    before = emulator.num_waiting()
    assert before > 0
    assert pending.read().tolist() == list(range(10))
    assert emulator.num_waiting() == before


# --- captures of CUDA graphs ---


def test_what_a_device_needs_once_is_made_with_its_first_tracker(emulated):
    """In a step it would wait for the device, in a capture end it."""
    emulator = emulated.native.emulator
    emulator.set_num_devices(8)
    counter = replace(emulated, device=6).access_counter("t", NUM_ROWS)  # others use lower ones
    emulator.calls()
    save_some_rows(counter)
    once = {"cudaHostAlloc", "cudaMemPoolCreate", "cudaStreamCreateWithFlags"}
    assert not once & set(emulator.calls())


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_a_graph_may_hold_are_loaded_with_the_tracker(emulated, kind):
    emulator = emulated.native.emulator
    emulator.unload_kernels()
    tracker = KINDS[kind](emulated)
    emulator.set_capturing(True)
    tracker.observe(np.array([3]))
    assert emulator.set_capturing(False)
    assert tracker.num_dirty() == 0
    for _ in range(2):
        emulator.replay_graph()
        assert tracker.num_dirty() == 1
    assert kind != "AccessCounter" or tracker.counts()[3] == 2


def test_a_mark_breaks_no_capture_and_rows_are_not_named_to_a_device_in_one(emulated):
    """Their ids would be uploaded at each replay, from memory that holds others by then."""
    emulator = emulated.native.emulator
    counter = emulated.access_counter("t", NUM_ROWS)
    lookups = np.arange(100)
    emulator.set_lazy(True)
    counter.observe(lookups)
    mark = emulated.native.StreamMark(device=0)
    emulator.set_capturing(True)
    assert not mark.is_passed()
    mark.wait()
    assert mark.is_passed()
    assert emulator.set_capturing(False)
    emulator.set_capturing(True)
    with pytest.raises(UsageError, match="while a CUDA graph is captured"):
        counter.take(np.arange(10))
    emulator.set_capturing(False)


# --- contexts and streams ---


@pytest.mark.parametrize("is_used", [False, True])
def test_after_a_call_the_thread_has_the_context_that_it_had(emulated, is_used):
    emulator = emulated.native.emulator
    emulator.set_num_devices(3)
    emulator.set_device(2)
    byte = np.zeros(1, np.uint8)
    if is_used:
        emulator.submit_fill(byte.ctypes.data, 1, 1)
    context = emulator.current_context()
    assert context == (2 if is_used else -1)
    counter = emulated.native.DeviceAccessCounter(name="t", num_rows=5, device=1)
    assert emulator.current_context() == context
    del counter
    assert emulator.current_context() == context
    assert emulator.used_devices() == ({1, 2} if is_used else {1})


def test_work_on_another_stream_comes_after_all_that_was_submitted_before(emulated):
    native, emulator = emulated.native, emulated.native.emulator
    counter = emulated.access_counter("t", NUM_ROWS)
    side = emulator.make_stream()
    lookups = [np.arange(100), np.arange(50, 70)]
    emulator.set_lazy(True)
    counter.observe(lookups[0])
    native.use_stream(0, side)
    assert counter.num_dirty() == 100
    pending = counter.begin_select(0, NUM_ROWS, 10)
    taken = counter.take(np.arange(90))
    native.use_stream(0, 0)
    counter.observe(lookups[1])
    assert pending.read().tolist() == list(range(10))
    assert counter.num_dirty() == 30
    counter.put_back(taken)
    assert counter.counts()[[0, 60, 95]].tolist() == [1, 2, 1]
    del pending, taken  # they give memory back in the order of the stream
    emulator.destroy_stream(side)


def test_a_stream_that_captures_is_not_ordered_with_others(emulated):
    native, emulator = emulated.native, emulated.native.emulator
    counter = emulated.access_counter("t", NUM_ROWS)
    side = emulator.make_stream()
    native.use_stream(0, side)
    counter.observe(np.array([1]))
    emulator.set_capturing(True)  # the default stream
    native.use_stream(0, 0)
    counter.observe(np.array([2]))
    assert emulator.set_capturing(False)
    emulator.replay_graph()
    native.use_stream(0, side)
    native.use_stream(0, 0)
    assert counter.num_dirty() == 2
    emulator.destroy_stream(side)


# --- a device without memory pools ---


def test_a_device_without_memory_pools_keeps_blocks_of_its_own(emulated):
    native, emulator = emulated.native, emulated.native.emulator
    emulator.set_num_devices(8)
    emulator.set_memory_pools(False)
    counter = replace(emulated, device=7).access_counter("t", NUM_ROWS)
    save_some_rows(counter)
    emulator.calls()
    held = sum(emulator.allocations().values())
    for _ in range(3):
        assert save_some_rows(counter).num_rows == 100
        emulator.synchronize()
    calls = emulator.calls()
    assert not {"cudaMalloc", "cudaMallocFromPoolAsync", "cudaMemPoolCreate"} & set(calls)
    assert sum(emulator.allocations().values()) == held
    native.trim_memory(7)
    assert sum(emulator.allocations().values()) < held
    emulator.fail_call("cudaMalloc", 1)
    with pytest.raises(CudaError, match="out of memory"):
        save_some_rows(counter)
