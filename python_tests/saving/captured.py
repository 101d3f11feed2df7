"""Runs whose large tables are captured while training goes on, and their captured rows."""

import torch

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


def captured_rows(checkpointer):
    """The rows of all live segments: {table: {row id: (step, {array: row})}}."""
    rows = {}
    for _, path in row_records(checkpointer.store):
        for chunk in read_chunks(path):
            for position, row_id in enumerate(chunk.row_ids.tolist()):
                values = {name: array[position] for name, array in chunk.arrays.items()}
                rows.setdefault(chunk.table, {})[row_id] = (chunk.step, values)
    return rows


def assert_captured(checkpointer, rows_of_step):
    captured = captured_rows(checkpointer)
    assert captured
    for table, rows in captured.items():
        of_steps = {}
        for row_id, (step, values) in rows.items():
            of_steps.setdefault(step, {})[row_id] = values
        for step, found in of_steps.items():
            then = rows_of_step[step][table]
            assert all(row.keys() == then.keys() for row in found.values())
            for name, array in then.items():
                values = torch.stack([row[name] for row in found.values()])
                assert_same(values, array[list(found)])


def num_dirty(checkpointer):
    return sum(tracker.num_dirty() for tracker in checkpointer._trackers.values())


def train_until_captured(run, limit=200):
    """Steps until the snapshot in flight is captured; returns the rows after each step."""
    rows = {}
    checkpointer = run.checkpointer
    step = checkpointer.step

    def step_and_copy(num_samples=1):
        rows[checkpointer.step_count + 1] = copy_rows(checkpointer.tables)
        return step(num_samples)

    checkpointer.step = step_and_copy
    for count in range(limit):
        run.train(1)
        if count and (
            checkpointer._saver.in_flight is None
            or checkpointer._saver.in_flight.state == "captured"
        ):
            break
    else:
        raise AssertionError(f"not captured in {limit} steps")
    checkpointer.step = step
    return rows
