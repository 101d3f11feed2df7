"""csrc/testing/: the emulated device finds what it is there to find."""

import pytest

LAUNCH_FAILURE = 719


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "fault",
    ["some threads miss a barrier", "a lane is not in its mask", "lanes disagree on the mask"],
)
def test_a_kernel_that_would_hang_or_go_wrong_fails(emulated, fault, seed):
    emulated.native.emulator.shuffle_threads(seed)
    assert emulated.native.emulator.run_broken_kernel(fault) == LAUNCH_FAILURE
    assert emulated.native.emulator.run_broken_kernel("none") == 0
