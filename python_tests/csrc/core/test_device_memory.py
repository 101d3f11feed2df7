"""csrc/core/cuda/: memory, devices and copies, on the emulated device."""

import numpy as np
import pytest

from cpr_ext.errors import CudaError
from python_tests.csrc.backends import live_bytes

NUM_ROWS = 3000


@pytest.fixture
def reclaimed(emulated):
    """Devices for which memory was reclaimed; ``answer`` says whether there was any."""
    answer, devices = [True], []
    emulated.native.set_memory_reclaimer(lambda device: devices.append(device) or answer[0])
    yield answer, devices
    emulated.native.set_memory_reclaimer(lambda device: False)


def save_some_rows(counter):
    counter.observe(np.arange(0, NUM_ROWS, 3))
    row_ids = counter.select(0, NUM_ROWS, 100)
    return counter.take(row_ids)


def test_memory_is_mapped_once_however_often_training_waits_for_the_device(emulated):
    emulator = emulated.native.emulator
    counter = emulated.access_counter("t", NUM_ROWS)
    save_some_rows(counter)
    emulator.synchronize()
    emulator.mappings()
    for _ in range(3):
        save_some_rows(counter)
        emulator.synchronize()
    assert emulator.mappings() == 0


def test_what_other_tests_have_left_as_garbage_is_not_counted_as_live(emulated):
    before = live_bytes(emulated)
    cycle = [emulated.access_counter("t", 1000)]
    cycle.append(cycle)
    del cycle
    assert live_bytes(emulated) == before


def test_unused_memory_is_given_back_on_request(emulated):
    emulator = emulated.native.emulator
    emulated.native.trim_memory(0)
    before = emulator.pooled_bytes()
    counter = emulated.access_counter("t", NUM_ROWS)
    taken = save_some_rows(counter)
    emulated.native.trim_memory(0)
    assert emulator.pooled_bytes() > before
    counter.put_back(taken)
    del taken
    emulated.native.trim_memory(0)
    assert emulator.pooled_bytes() == before


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaMallocFromPoolAsync"])
def test_an_allocation_is_tried_again_once_memory_was_reclaimed(emulated, reclaimed, call):
    _, devices = reclaimed
    emulated.native.emulator.fail_call(call, 1)
    counter = emulated.access_counter("t", NUM_ROWS)
    save_some_rows(counter)
    assert devices == [0]


def test_an_allocation_fails_if_nothing_was_reclaimed(emulated, reclaimed):
    answer, devices = reclaimed
    answer[0] = False
    emulated.native.emulator.fail_call("cudaMalloc", 1)
    with pytest.raises(CudaError, match="out of memory"):
        emulated.access_counter("t", NUM_ROWS)
    assert devices == [0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_of_the_reclaimer_is_not_that_of_the_allocation(emulated):
    def fail(device):
        raise ValueError

    emulated.native.set_memory_reclaimer(fail)
    emulated.native.emulator.fail_call("cudaMalloc", 1)
    with pytest.raises(CudaError, match="out of memory"):
        emulated.access_counter("t", NUM_ROWS)
    emulated.native.set_memory_reclaimer(lambda device: False)


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
