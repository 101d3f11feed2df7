"""csrc/staging/slot_pool.h: a fixed number of buffers, which jobs lease and return."""

import pytest

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments


def test_what_is_no_pool_is_refused():
    for num_slots in (0, -1):
        with pytest.raises(UsageError, match="at least 1"):
            native.SlotPool(num_slots=num_slots, slot_bytes=4096)
    for slot_bytes in (0, -4096, 1, 4095, 4097):
        with pytest.raises(UsageError, match="multiple of 4096"):
            native.SlotPool(num_slots=1, slot_bytes=slot_bytes)


@pytest.mark.skipif(segments.SANITIZER != "", reason="a sanitizer reports the attempt")
def test_slots_no_machine_has_are_a_memory_error():
    with pytest.raises(MemoryError):
        native.SlotPool(num_slots=1, slot_bytes=1 << 60)
