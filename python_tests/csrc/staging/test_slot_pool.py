"""csrc/staging/slot_pool.h: a fixed number of buffers, leased and returned."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments


@given(st.integers(1, 6), st.lists(st.sampled_from(["acquire", "release", "drop"]), max_size=40))
def test_every_slot_is_leased_to_one_holder_and_none_is_lost(num_slots, actions):
    pool = native.SlotPool(num_slots=num_slots, slot_bytes=3 * 4096)
    held = []
    for action in actions:
        if action == "acquire":
            lease = pool.try_acquire()
            assert (lease is None) == (len(held) == num_slots)
            if lease is not None:
                held.append(lease)
        elif held:
            lease = held.pop(0)
            if action == "release":
                lease.release()
                assert not lease.is_held
                lease.release()  # a second time does nothing
            del lease
        assert pool.num_free == num_slots - len(held)
        addresses = sorted(lease.address for lease in held)
        assert all(address % 4096 == 0 for address in addresses)
        assert all(b - a >= pool.slot_bytes for a, b in itertools.pairwise(addresses))


def test_acquire_waits_until_another_thread_returns_a_slot():
    pool = native.SlotPool(num_slots=1, slot_bytes=4096)
    lease = pool.acquire()
    with ThreadPoolExecutor(1) as waiter:
        got = waiter.submit(pool.acquire)
        assert not wait([got], 0.05).done
        lease.release()
        assert got.result(10).is_held
    del got
    assert pool.num_free == 1


def test_many_threads_share_few_slots_without_two_holding_the_same():
    pool = native.SlotPool(num_slots=2, slot_bytes=4096)
    guard, held, clashes = threading.Lock(), set(), []

    def work():
        for _ in range(100):
            lease = pool.acquire()
            with guard:
                if lease.address in held:
                    clashes.append(lease.address)
                held.add(lease.address)
            time.sleep(0)
            with guard:
                held.discard(lease.address)
            lease.release()

    with ThreadPoolExecutor(6) as workers:
        [each.result() for each in [workers.submit(work) for _ in range(6)]]
    assert clashes == []
    assert pool.num_free == 2


def test_a_lease_keeps_its_pool_alive_and_what_is_no_pool_is_refused():
    pool = native.SlotPool(num_slots=1, slot_bytes=4096)
    lease = pool.acquire()
    del pool
    assert lease.is_held
    lease.release()
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
