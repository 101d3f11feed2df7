"""csrc/testing/: the emulated device finds what it is there to find."""

import pytest

from python_tests.csrc.segments import SANITIZER

INVALID_VALUE, INVALID_DEVICE, INVALID_HANDLE, LAUNCH_FAILURE = 1, 101, 400, 719
UNSUPPORTED, ISOLATION, CAPTURED_EVENT = 900, 905, 907  # in a capture


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_would_hang_or_go_wrong_does(emulated, seed):
    """It fails; or a warp runs ahead of the others where no barrier holds it."""
    emulator = emulated.native.emulator
    emulator.shuffle_threads(seed)
    for fault in (
        *("some threads miss a barrier", "a lane is not in its mask"),
        "lanes disagree on the mask",
    ):
        assert emulator.run_broken_kernel(fault) == LAUNCH_FAILURE
        assert emulator.run_broken_kernel("none") == 0
    assert emulator.misread_sums(waits=True) == 0
    assert emulator.misread_sums(waits=False) > 0


def test_shared_memory_that_a_kernel_does_not_clear_is_garbage_in_every_block(emulated):
    """What a template has is not among it: it must lie in plain functions."""
    emulator = emulated.native.emulator
    assert emulator.sum_shared(clears=True) == 2 * 64
    for _ in range(2):
        assert emulator.sum_shared(clears=False) == 2 * 64 * 0xABABABAC
    selection = 2048 * 4 + 8 + 8 * 8
    assert emulator.shared_bytes() >= selection + 64 * 4


@pytest.mark.skipif(SANITIZER != "", reason="AddressSanitizer ends the process at such a write")
@pytest.mark.parametrize("num_elements", [1, 127, 128, 1000])
def test_a_kernel_that_writes_behind_its_memory_fails(emulated, num_elements):
    emulator = emulated.native.emulator
    assert emulator.overrun_memory(num_elements, 0) == 0
    assert emulator.overrun_memory(num_elements, 1) == LAUNCH_FAILURE
    assert emulator.overrun_memory(num_elements, 0) == 0


#: A call of the emulator that makes a mistake -> by its name, the error that it must give.
MISTAKES = {
    "call_in_capture": {
        "nothing": 0,
        "launch": 0,
        "launch for the first time": UNSUPPORTED,
        "wait for the stream": UNSUPPORTED,
        "wait for an event": UNSUPPORTED,
        "ask for an event": UNSUPPORTED,
        "wait for an event of before": ISOLATION,
        "allocate": UNSUPPORTED,
    },
    "relaxed_call_in_capture": {
        "nothing": 0,
        "wait for the stream": UNSUPPORTED,
        "wait for it": CAPTURED_EVENT,
        "ask for it": CAPTURED_EVENT,
        "let another stream wait for it": ISOLATION,
    },
    # A device sees mapped host memory alone.
    "see_host_memory": {
        "none": 0,
        **dict.fromkeys(("portable", "inside", "beside"), INVALID_VALUE),
    },
    "mix_devices": {
        "none": 0,
        "launch on the other's stream": INVALID_HANDLE,
        "record the other's event": INVALID_HANDLE,
    },
    "call_wrongly": {
        "none": 0,
        "use a device that is not there": INVALID_DEVICE,
        **dict.fromkeys(("launch too many threads", "launch no block"), INVALID_VALUE),
        "free twice": INVALID_VALUE,
    },
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_refused_as_a_device_refuses_it(emulated, kind):
    call = getattr(emulated.native.emulator, kind)
    assert {mistake: call(mistake) for mistake in MISTAKES[kind]} == MISTAKES[kind]


def test_a_wait_on_another_thread_breaks_a_capture_unless_the_thread_may(emulated):
    emulator = emulated.native.emulator
    assert emulator.wait_beside_capture(waits_beside=False) == UNSUPPORTED
    assert emulator.wait_beside_capture(waits_beside=True) == 0


def test_a_pool_without_a_threshold_maps_its_memory_anew_after_each_wait(emulated):
    emulator = emulated.native.emulator
    assert emulator.count_mappings(5, keeps=False) == 5
    assert emulator.count_mappings(5, keeps=True) == 1


def test_memory_that_is_freed_before_a_kernel_reads_it_is_another_owners(emulated):
    emulator = emulated.native.emulator
    assert emulator.read_freed(frees_late=True, has_next=True) == 0x01010101
    assert emulator.read_freed(frees_late=False, has_next=True) == 0xABABABAB
    if not SANITIZER:  # which ends the process at such a read
        assert emulator.read_freed(frees_late=False, has_next=False) == 0xABABABAB
