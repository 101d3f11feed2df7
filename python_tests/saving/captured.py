"""Runs whose large tables are captured while training goes on, and their captured rows."""

import cpr_ext
from python_tests.helpers import assert_same, copy_rows, read_chunks, row_records

TABLES = {"a": (20_000, 8), "b": (700, 4)}
OPTIONS = {
    "overlap": "always",
    "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10),
    "num_shards": 2,
    "schedule": cpr_ext.EverySteps(1000),
    "lookups": 200,
}


def assert_captured(checkpointer, rows_of_step):
    """The rows of all live segments are those of the step that their chunk names."""
    chunks = [chunk for _, path in row_records(checkpointer.store) for chunk in read_chunks(path)]
    assert chunks
    for chunk in chunks:
        then = rows_of_step[chunk.step][chunk.table]
        assert chunk.arrays.keys() == then.keys()
        for name, array in then.items():
            assert_same(chunk.arrays[name], array[chunk.row_ids])


def train_until_captured(run, limit=200):
    """Steps until the snapshot in flight is captured; returns the rows after each step."""
    rows, checkpointer = {}, run.checkpointer
    step, saver = checkpointer.step, checkpointer._saver

    def step_and_copy(num_samples=1):
        rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
        return step(num_samples)

    checkpointer.step = step_and_copy
    for count in range(limit):
        run.train(1)
        if count and (saver.in_flight is None or saver.in_flight.state == "captured"):
            break
    else:
        raise AssertionError(f"not captured in {limit} steps")
    checkpointer.step = step
    return rows
