"""Segments that lie over one another, restored in one call: read ahead, laid down in order."""

import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from python_tests.csrc import segments

NUM_ROWS = 60


def write_generation(path, row_ids, seed):
    """A segment of some rows, of which every value tells its generation."""
    table = segments.random_table(num_rows=NUM_ROWS, dim=16, seed=seed, row_ids=row_ids)
    pipe = segments.pipeline(slot_bytes=segments.smallest_slot([table]))
    return segments.write_segment(path, [table], pipe=pipe)


@given(data=st.data(), num_slots=st.integers(1, 5), num_threads=st.sampled_from([0, 2]))
def test_of_a_row_in_several_segments_the_last_state_stays(
    tmp_path_factory, data, num_slots, num_threads
):
    folder = tmp_path_factory.mktemp("segments")
    some_rows = st.sets(st.integers(0, NUM_ROWS - 1), max_size=NUM_ROWS).map(
        lambda rows: np.array(sorted(rows), np.int64)
    )
    generations = data.draw(st.lists(some_rows, max_size=5))
    unreadable = data.draw(st.sets(st.sampled_from(range(5)), max_size=2))
    target = segments.random_table(num_rows=NUM_ROWS, dim=16, seed=99)
    expected = {name: array.copy() for name, array in target.arrays.items()}
    written = []
    for number, row_ids in enumerate(generations):
        segment = write_generation(folder / str(number), row_ids, number)
        written.append(segment)
        if number in unreadable:
            segment.path.unlink()
            continue
        for name, array in segment.layout.tables[0].arrays.items():
            expected[name][row_ids] = array[row_ids]
    results = native.restore_segments(
        [segments.source(segment, [target]) for segment in written],
        slots=native.SlotPool(num_slots=num_slots, slot_bytes=1 << 17),
        pool=native.ThreadPool(num_threads=num_threads) if num_threads else None,
    )
    for name, array in expected.items():
        np.testing.assert_array_equal(target.arrays[name], array)
    for number, (row_ids, result) in enumerate(zip(generations, results, strict=True)):
        lost = number in unreadable
        assert result["rows_restored"] == [0 if lost else len(row_ids)]
        assert sum(count for _, _, count, _, _ in result["damaged"]) == lost * len(row_ids)
        assert (result["bytes_read"] > 0) == (not lost and len(row_ids) > 0)


def test_ctrl_c_ends_a_long_restoration(tmp_path):
    segment = write_generation(tmp_path / "s", np.arange(NUM_ROWS), 0)
    target = segments.random_table(num_rows=NUM_ROWS, dim=16, seed=1)
    sources = [segments.source(segment, [target])] * 200_000  # many seconds of work
    slots = native.SlotPool(num_slots=2, slot_bytes=1 << 17)
    main = threading.main_thread().ident

    def press():
        time.sleep(0.3)
        signal.pthread_kill(main, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        native.restore_segments(sources, slots=slots)
    pressing.join()
    (result,) = native.restore_segments(sources[:1], slots=slots)
    assert result["rows_restored"] == [NUM_ROWS]
