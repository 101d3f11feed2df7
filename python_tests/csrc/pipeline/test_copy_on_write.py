"""csrc/pipeline/copy_on_write: rows change once they are copied; the segment has the old ones."""

import ctypes
import os
import resource
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from python_tests.csrc import segments
from python_tests.csrc.pipeline.test_round_trip import tables as any_table
from python_tests.csrc.segments import ALIGNMENT, Layout, Table, random_table

ENTRY_BYTES = 64  # the smallest: a list node and the row, in whole cache lines


def pipeline(num_slots, slot_bytes, copy_on_write_bytes, num_threads=0):
    pool = native.ThreadPool(num_threads=num_threads) if num_threads else None
    return native.SnapshotPipeline(
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        copy_on_write_bytes=copy_on_write_bytes,
        pool=pool,
    )


def keep(job, table, row_ids):
    """How many of the row ids of one table are done."""
    (done,) = job.copy_before_write([(table, row_ids)])
    return done


def keep_all(job, *left):
    """As training does it: where memory is full, the next chunks are captured first."""
    rounds = 0
    while True:
        done = job.copy_before_write(left)
        left = [
            (table, ids[n:]) for (table, ids), n in zip(left, done, strict=True) if ids[n:].size
        ]
        if not left:
            return rounds
        assert job.state == "capturing"
        job.capture(step=1, max_bytes=1, wait_for_slot=True)
        rounds += 1
        assert rounds < 10_000


def change(table: Table, row_ids, random):
    """What an optimizer's step does: other values in these rows of every array."""
    positions = row_ids - table.first_row_id
    for array in table.arrays.values():
        array[positions] = random.integers(0, 100, array[positions].shape).astype(array.dtype)


def live_rows(table: Table) -> np.ndarray:
    num_rows = len(next(iter(table.arrays.values())))
    return np.arange(table.first_row_id, table.first_row_id + num_rows)


@given(
    tables=st.lists(st.integers(0, 9), min_size=1, max_size=3).flatmap(
        lambda names: st.tuples(*(any_table(f"t{i}") for i in range(len(names))))
    ),
    slot_units=st.integers(1, 3),
    chunk_units=st.integers(0, 2),
    num_slots=st.integers(2, 3),
    copy_on_write_bytes=st.sampled_from([ENTRY_BYTES * 2, 2048, 1 << 20]),
    steps=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 20_000]),  # captured in this step, about; 0: nothing
            st.sampled_from([0, 300, 2000]),  # rows that change, per table, at most
            st.booleans(),  # the tables in one call
        ),
        max_size=12,
    ),
    seed=st.integers(0, 2**32),
)
def test_the_file_holds_every_row_as_it_was_at_the_start(
    tmp_path_factory, tables, slot_units, chunk_units, num_slots, copy_on_write_bytes, steps, seed
):
    random = np.random.default_rng(seed)
    smallest = segments.smallest_slot(tables)
    largest_row = max(sum(array[:1].nbytes for array in table.arrays.values()) for table in tables)
    pipe = pipeline(
        num_slots, slot_units * smallest, copy_on_write_bytes + 2 * (largest_row + ENTRY_BYTES)
    )
    layout = Layout(tables)
    expected = layout.expected_file()
    path = tmp_path_factory.mktemp("cow") / "s"
    job = segments.start(
        pipe,
        path,
        layout,
        direct_io=False,
        refuse_nan=False,
        copy_on_write=True,
        max_chunk_bytes=chunk_units * smallest,
    )
    for max_bytes, count, is_one_call in steps:
        if max_bytes:
            job.capture(step=1, max_bytes=max_bytes, wait_for_slot=bool(random.integers(2)))
        changing = []
        for index, table in enumerate(tables):
            rows = live_rows(table)
            if len(rows) == 0:
                continue
            looked_up = random.choice(rows, count and random.integers(count))  # repeated ones too
            noise = np.array([-1, rows[-1] + 1, rows[0] - 1])  # of other shards, or no rows
            changing.append((index, np.concatenate([looked_up, noise])))
        for part in [changing] if is_one_call else [[each] for each in changing]:
            keep_all(job, *part)
            for index, row_ids in part:
                change(tables[index], np.unique(row_ids[:-3]), random)
    while job.state == "capturing":
        job.capture(step=1, wait_for_slot=True)
    job.wait("written")
    job.finish(segments.HEADER)
    assert path.read_bytes() == expected
    assert pipe.copied_bytes == 0


def test_without_keep_the_changed_rows_would_be_in_the_file(tmp_path):
    """The property above can fail."""
    table = random_table(num_rows=5000)
    layout = Layout([table])
    expected = layout.expected_file()
    pipe = pipeline(2, segments.smallest_slot([table]), 1 << 20)
    job = segments.start(pipe, tmp_path / "s", layout, copy_on_write=True)
    job.capture(step=1, max_bytes=1)
    table.arrays["weight"][4999] = 7
    while job.state == "capturing":
        job.capture(step=1, wait_for_slot=True)
    job.wait("written")
    job.finish(segments.HEADER)
    assert (tmp_path / "s").read_bytes() != expected


@pytest.mark.parametrize("rows", [{}, {"row_ids": np.arange(1, 5000, 3)}])
def test_hashes_are_of_the_rows_before_they_changed_when_their_chunks_are_captured(tmp_path, rows):
    table = random_table(num_rows=5000, **rows)
    arrays = list(table.arrays.values())
    hashes, then = (native.HostRowHashes(name="a", num_rows=5000) for _ in range(2))
    then.record(arrays, table.saved_ids)
    pipe = pipeline(2, segments.smallest_slot([table]), 1 << 20)
    given = [(hashes, len(arrays), None)]
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True, hashes=given)
    changing = np.arange(4999, 0, -7)
    assert keep(job, 0, changing) == len(changing)
    change(table, changing, np.random.default_rng(0))
    assert not hashes.values(table.saved_ids).any()  # training did not wait for them
    while job.state == "capturing":
        job.capture(step=1, max_bytes=1, wait_for_slot=True)
    assert (hashes.values(table.saved_ids) == then.values(table.saved_ids)).all()
    job.cancel("enough")


def test_a_row_is_copied_once_and_only_while_it_waits(tmp_path):
    table = random_table(num_rows=4096, row_ids=np.arange(0, 4096, 2))
    pipe = pipeline(2, segments.smallest_slot([table]), 1 << 20)
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True)
    rows = np.array([0, 0, 2, 1, 3, 4094, 4094])  # odd ones are not in the segment
    assert keep(job, 0, rows) == len(rows)
    copied = pipe.copied_bytes
    assert copied == 3 * ENTRY_BYTES
    assert keep(job, 0, rows) == len(rows)
    assert pipe.copied_bytes == copied
    job.capture(step=1, max_bytes=1, wait_for_slot=True)  # the first chunk: rows 0 and 2
    assert pipe.copied_bytes == ENTRY_BYTES
    keep(job, 0, np.array([0, 2, 6]))  # captured: they may change as they like
    assert pipe.copied_bytes == ENTRY_BYTES
    job.cancel("enough")
    assert pipe.copied_bytes == 0
    assert keep(job, 0, rows) == len(rows)
    assert pipe.copied_bytes == 0


def test_rows_of_a_last_chunk_that_is_not_full_are_not_copied_once_it_is_captured(tmp_path):
    table = random_table(num_rows=1500)  # chunks of 1024 rows and the rest
    smallest = segments.smallest_slot([table])
    pipe = pipeline(2, smallest, 1 << 20)
    stop = native.StopFlag()
    stop.set()
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True)
    for _ in range(2):
        job.capture(step=1, wait_for_slot=True, stop=stop)
    assert job.state == "capturing"  # it does not know yet that nothing is left
    keep(job, 0, np.arange(1500))
    assert pipe.copied_bytes == 0
    job.cancel("done")


def test_full_memory_is_told_and_capturing_frees_it(tmp_path):
    table = random_table(num_rows=4096)
    pipe = pipeline(2, segments.smallest_slot([table]), 10 * ENTRY_BYTES)
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True)
    rows = np.arange(4096)
    assert keep(job, 0, rows) == 10
    assert keep(job, 0, rows[10:]) == 0
    assert keep(job, 0, rows[:5]) == 5  # done already
    assert keep_all(job, (0, rows)) > 0


def test_wrong_calls_are_refused(tmp_path):
    table = random_table()
    pipe = pipeline(2, segments.smallest_slot([table]), 1 << 20)
    plain = segments.start(pipe, tmp_path / "plain", Layout([table]))
    with pytest.raises(UsageError, match="copy on write"):
        keep(plain, 0, np.arange(3))
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True)
    for wrong in (-1, 1):
        with pytest.raises(UsageError, match="table is"):
            keep(job, wrong, np.arange(3))
    for wrong in (np.zeros(3), np.zeros(3, np.int32)):
        with pytest.raises(UsageError, match="dtype"):
            keep(job, 0, wrong)
    with pytest.raises(UsageError, match="copy_on_write_bytes"):
        pipeline(2, ALIGNMENT, -1)
    plain.cancel("done")
    job.cancel("done")


def test_a_stopped_capture_comes_back_after_one_chunk_and_chunks_are_as_small_as_asked(tmp_path):
    table = random_table(num_rows=20_000)
    smallest = segments.smallest_slot([table])
    pipe = pipeline(2, 8 * smallest, 0)
    stop = native.StopFlag()
    job = segments.start(pipe, tmp_path / "s", Layout([table]), max_chunk_bytes=smallest)
    stop.set()
    assert stop.is_set()
    (chunk,) = job.capture(step=1, stop=stop, wait_for_slot=True)
    assert chunk[2] * 36 <= smallest
    stop.clear()
    assert len(job.capture(step=1, stop=stop, wait_for_slot=True)) > 5
    assert job.state != "capturing"
    job.wait("written")
    job.finish(segments.HEADER)
    assert (tmp_path / "s").read_bytes() == Layout([table]).expected_file()


@pytest.mark.parametrize("copy_on_write_bytes", [ENTRY_BYTES * 50, 1 << 20])
def test_capturing_on_another_thread_while_rows_change_in_turns(tmp_path, copy_on_write_bytes):
    """The way of a training loop: the capturing thread has the tables whenever no step runs."""
    random = np.random.default_rng(0)
    tables = [random_table("a", 30_000), random_table("b", 9000, row_ids=np.arange(0, 9000, 3))]
    layout = Layout(tables)
    expected = layout.expected_file()
    pipe = pipeline(2, 2 * segments.smallest_slot(tables), copy_on_write_bytes, num_threads=2)
    job = segments.start(
        pipe, tmp_path / "s", layout, copy_on_write=True, max_chunk_bytes=64 * 1024
    )
    stop, turn, back = native.StopFlag(), threading.Semaphore(0), threading.Semaphore(0)

    def capture():
        while True:
            turn.acquire()
            if job.state != "capturing":
                back.release()
                return
            job.capture(step=1, wait_for_slot=False, stop=stop)
            back.release()

    thread = threading.Thread(target=capture)
    thread.start()
    steps = 0
    while thread.is_alive() and job.state == "capturing":
        stop.clear()
        turn.release()
        stop.set()  # as soon as the optimizer is about to step
        back.acquire()
        for index, table in enumerate(tables):
            rows = random.integers(0, len(table.arrays["sum"]), 200)
            keep_all(job, (index, rows))
            change(table, np.unique(rows), random)
        steps += 1
    turn.release()
    thread.join()
    job.wait("written")
    job.finish(segments.HEADER)
    assert steps > 2
    assert (tmp_path / "s").read_bytes() == expected


@pytest.mark.skipif("CPR_EXT_BUILT_IN" in os.environ, reason="a sanitizer makes pages of its own")
@pytest.mark.parametrize("is_made", [True, False])
def test_the_first_copies_meet_pages_that_are_there(tmp_path, is_made):
    table = random_table(num_rows=40_000)
    ctypes.CDLL(None).malloc_trim(0)  # memory that other tests have freed has its pages
    pipe = pipeline(2, segments.smallest_slot([table]), 64 << 20)
    if is_made:
        pipe.make_memory()
    job = segments.start(pipe, tmp_path / "s", Layout([table]), copy_on_write=True)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    keep(job, 0, np.arange(20_000))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    pages = pipe.copied_bytes // resource.getpagesize()
    assert pages > 300
    assert (faults < pages // 2) == is_made
    job.cancel("enough")
