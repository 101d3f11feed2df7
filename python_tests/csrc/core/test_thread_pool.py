"""csrc/core/thread_pool.h, seen through gather_rows on inputs that are cut into many tasks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments

ROWS = 40_000  # 64 bytes each: 5 tasks


def _table():
    return np.random.default_rng(0).integers(0, 2**60, (ROWS, 8), dtype=np.int64)


def test_a_pool_may_go_at_once_and_an_impossible_number_of_threads_is_refused():
    for num_threads in (1, 2, 8) * 20:
        native.ThreadPool(num_threads=num_threads)
    for num_threads in (0, -1, 1025):
        with pytest.raises(UsageError, match="1 to 1024"):
            native.ThreadPool(num_threads=num_threads)


@pytest.mark.parametrize("num_threads", [3, 16] if segments.SANITIZER else [1, 2, 3, 4, 16])
def test_every_task_runs_exactly_once_whatever_the_number_of_threads(num_threads):
    pool = native.ThreadPool(num_threads=num_threads)
    assert pool.num_threads == num_threads
    table = _table()
    row_ids = np.random.default_rng(1).permutation(ROWS)
    for _ in range(20):  # a loop must leave nothing behind for the next
        out = np.zeros_like(table)
        native.gather_rows(table, row_ids, out, pool=pool)
        np.testing.assert_array_equal(out, table[row_ids])


def test_callers_on_several_threads_take_turns_with_one_pool():
    pool = native.ThreadPool(num_threads=2)
    table = _table()

    def work(seed):
        row_ids = np.random.default_rng(seed).integers(0, ROWS, ROWS)
        for _ in range(10):
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
        assert gather()
        for _ in range(50):  # also at moments in which a thread of the pool holds its lock
            gather()
            child = os.fork()
            if child == 0:
                good = gather()
                pool = None
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gather()
        """
    )
