"""csrc/core: checksums, instruction sets, a pool of threads, pages that are made on request."""

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments

# --- checksums ---


def _backends():
    try:
        native.crc32c(b"", backend="sse42")
    except UsageError:
        return ["portable", "best"]
    return ["portable", "sse42", "best"]


def _bitwise(data, crc=0):
    """RFC 3720: reflected polynomial 0x1EDC6F41, one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


of_every_backend = pytest.mark.parametrize("backend", _backends())


@of_every_backend
@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_any_bytes_from_any_start_give_the_bitwise_value(backend, data, crc):
    assert native.crc32c(b"123456789", backend=backend) == _bitwise(b"123456789") == 0xE3069283
    assert native.crc32c(data, crc, backend=backend) == _bitwise(data, crc)


# 3072 bytes is where the SSE4.2 backend begins to run three streams side by side.
@of_every_backend
@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 7))
@example(3071, 0, 0)
@example(3072, 1, 0)
@example(3080, 3072, 1)
@example(9216, 3072, 3)
def test_a_checksum_may_be_continued_from_any_split(backend, size, split, shift):
    data = np.random.default_rng(size).integers(0, 256, size + shift, dtype=np.uint8)[shift:]
    split = min(split, size)
    head = native.crc32c(data[:split], backend=backend)
    whole = native.crc32c(data, backend="portable")
    assert native.crc32c(data[split:], head, backend=backend) == whole
    assert native.crc32c(data, backend=backend) == whole


def test_scattered_bytes_and_an_unknown_backend_are_refused():
    data = np.arange(64, dtype=np.uint8)
    for scattered in (data[::2], data[::-1], data.reshape(8, 8).T):
        with pytest.raises(UsageError, match="contiguous"):
            native.crc32c(scattered)
    with pytest.raises(UsageError, match="best, portable, sse42"):
        native.crc32c(b"", backend="best?")


# --- instruction sets; that kernels agree is tested with the kernels ---


def test_the_best_is_used_unless_the_environment_names_another_that_there_is():
    names = native.instruction_sets()
    assert names[0] == "portable"
    with pytest.raises(UsageError, match="'sve2'; this CPU has: portable"):
        native.use_instruction_set("sve2")
    code = "from cpr_ext._native import native; print(native.instruction_set())"
    for wanted, found in (("portable", "portable"), ("of no use", names[-1])):
        environment = {**os.environ, "CPR_EXT_INSTRUCTION_SET": wanted}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == found


# --- threads, seen through gather_rows on inputs that are cut into many tasks ---

ROWS = 40_000  # 64 bytes each: 5 tasks


def _table():
    return np.random.default_rng(0).integers(0, 2**60, (ROWS, 8), dtype=np.int64)


def test_a_pool_may_go_at_once_and_an_impossible_number_of_threads_is_refused():
    for num_threads in (1, 2, 8) * 20:
        assert native.ThreadPool(num_threads=num_threads).num_threads == num_threads
    for num_threads in (0, -1, 1025):
        with pytest.raises(UsageError, match="1 to 1024"):
            native.ThreadPool(num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [3, 16] if segments.SANITIZER else [1, 2, 4, 16])
def test_every_task_runs_exactly_once_for_callers_that_take_turns(num_threads):
    pool, table = native.ThreadPool(num_threads=num_threads), _table()

    def work(seed):
        row_ids = np.random.default_rng(seed).permutation(ROWS)
        for _ in range(6):  # a loop must leave nothing behind for the next
            out = np.zeros_like(table)
            native.gather_rows(table, row_ids, out, pool=pool)
            np.testing.assert_array_equal(out, table[row_ids])

    with ThreadPoolExecutor(4) as callers:
        list(callers.map(work, range(4)))


@pytest.mark.skipif(segments.SANITIZER != "", reason="a sanitizer needs the address space itself")
def test_threads_the_system_refuses_are_an_exception_not_an_abort():
    segments.run_python(
        """
        import resource
        from cpr_ext._native import native
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, resource.RLIM_INFINITY))
        try:
            native.ThreadPool(num_threads=1024)  # 8 MiB of stack each
        except RuntimeError as error:
            assert "Resource" in str(error), error
        else:
            raise AssertionError("1024 threads fit into 2 GiB?")
        native.ThreadPool(num_threads=4)
        """
    )


def test_a_forked_child_can_drop_its_copy_of_a_pool_and_work_without_it():
    segments.run_python(
        """
        import os
        import numpy as np
        from cpr_ext._native import native
        pool = native.ThreadPool(num_threads=4)
        table = np.arange(320_000).reshape(-1, 8)
        row_ids = np.arange(len(table))[::-1].copy()
        def gather():
            out = np.zeros_like(table)
            native.gather_rows(table, row_ids, out, pool=pool)
            return np.array_equal(out, table[::-1])
        for _ in range(50):  # also at moments in which a thread of the pool holds its lock
            assert gather()
            child = os.fork()
            if child == 0:
                good = gather()
                pool = None
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


# --- memory of counts and hashes, made on request: the first writes then wait for no page ---

MANY = 64 << 20
ONE_IN_EACH_PAGE = np.arange(0, MANY, 1 << 19)


@pytest.mark.parametrize("kind", ["AccessCounter", "DirtyRows", "HostRowHashes"])
@pytest.mark.parametrize("is_made", [True, False])
def test_the_first_writes_meet_pages_that_are_there_and_what_was_written_stays(kind, is_made):
    owner = getattr(native, kind)(name="a", num_rows=MANY)
    array = np.ones((MANY, 1), dtype=np.uint8)
    if is_made:
        owner.make_memory()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if kind == "HostRowHashes":
        owner.record([array], ONE_IN_EACH_PAGE)
    else:
        owner.observe(ONE_IN_EACH_PAGE)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    # Others may have some, and a sanitizer; pages of 2 MB that are not there have at least 64.
    is_measured = kind != "DirtyRows" and not segments.SANITIZER
    assert not is_measured or (faults < 20) == is_made
    owner.make_memory()
    assert kind == "HostRowHashes" or owner.num_dirty() == len(ONE_IN_EACH_PAGE)
