"""What a run tells of its losses: row updates, against a plain recount from files; PLS."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext.state.table import shard_row_range
from python_tests.helpers import Trained, make_indices, read_chunks, row_records

NUM_SHARDS = 3
OPTIONS = {"num_shards": NUM_SHARDS, "schedule": cpr_ext.EverySteps(4, when_busy="wait")}
PRIORITIES = [
    cpr_ext.MostFrequentlyUsed(0.1),
    cpr_ext.SubSampledUsed(0.1),
    cpr_ext.LargestChange(0.1),
    cpr_ext.AllRows(),
]


def lookups_of_step(run, step):
    """What ``Trained`` looked up in the step after ``step`` of them: {table: row ids}."""
    generator = torch.Generator().manual_seed(1000 + step)
    return make_indices(run.model, generator, run.lookups)


def recounted(run, shard, lost_at):
    """Lookups of a shard's rows in the steps after each row was saved, or lost, last."""
    saved = {}
    for _, path in row_records(run.store):
        for chunk in read_chunks(path):
            for row in chunk.row_ids.tolist():
                key = (chunk.table.removeprefix("tables."), row)
                saved[key] = max(saved.get(key, 0), chunk.step)
    lost = 0
    for step in range(run.checkpointer.step_count):
        for name, rows in lookups_of_step(run, step).items():
            begin, end = shard_row_range(run.tables[name][0], shard, NUM_SHARDS)
            for row in rows.tolist():
                is_saved = step + 1 <= max(saved.get((name, row), 0), lost_at)
                lost += begin <= row < end and not is_saved
    return lost


@settings(deadline=None, max_examples=6)
@given(steps=st.integers(2, 17), more=st.integers(0, 9))
def test_row_updates_lost_are_those_since_each_row_was_saved(tmp_path_factory, steps, more):
    run = Trained(tmp_path_factory.mktemp("run"), priority=PRIORITIES[0], **OPTIONS)
    with run.checkpointer as checkpointer:
        run.train(steps)
        report = checkpointer.recover(shards=[1])
        expected = recounted(run, 1, 0)
        assert report.row_updates_lost == expected
        run.train(more)
        again = checkpointer.recover(shards=[0, 1])
        expected_again = recounted(run, 1, steps) + recounted(run, 0, 0)
        assert again.row_updates_lost == expected_again
        metrics = checkpointer.metrics
        assert metrics.row_updates_lost == expected + expected_again
        assert metrics.row_updates == (steps + more) * run.lookups * len(run.tables)
        assert metrics.share_of_row_updates_lost == metrics.row_updates_lost / metrics.row_updates


def test_what_is_not_counted_is_not_told(tmp_path):
    for number, priority in enumerate(PRIORITIES):
        run = Trained(tmp_path / str(number), priority=priority, **OPTIONS)
        with run.checkpointer as checkpointer:
            run.train(6)
            is_counted = isinstance(priority, cpr_ext.MostFrequentlyUsed)
            assert (checkpointer.recover(shards=[0]).row_updates_lost is not None) == is_counted
            assert (checkpointer.metrics.share_of_row_updates_lost is None) != is_counted


def test_running_pls_is_of_the_job_if_its_length_is_known_else_of_the_samples_so_far(tmp_path):
    never = cpr_ext.EverySteps(10**6)
    known = cpr_ext.TargetPLS(0.5, mtbf_hours=1e6, total_samples=1000) | never
    for number, (schedule, total) in enumerate([(never, None), (known, 1000)]):
        run = Trained(tmp_path / str(number), num_shards=NUM_SHARDS, schedule=schedule)
        with run.checkpointer as checkpointer:
            run.train(1)
            checkpointer.wait()
            run.train(9)
            report = checkpointer.recover(shards=[0, 2])
            assert report.samples_lost == 2 * 90
            pls = checkpointer.metrics.portion_of_lost_samples
            assert pls == pytest.approx(180 / ((total or 100) * NUM_SHARDS))
            run.train(10)
            pls = checkpointer.metrics.portion_of_lost_samples
            assert pls == pytest.approx(180 / ((total or 200) * NUM_SHARDS))
