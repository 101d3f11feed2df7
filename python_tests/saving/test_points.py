"""Snapshots over several steps, and the full-recovery points that follow them."""

import pytest
import torch

import cpr_ext
from cpr_ext.saving import claims
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.state.table import find_tables
from python_tests.helpers import Trained, assert_same, short_windows
from python_tests.saving.captured import TABLES

NEVER = cpr_ext.EverySteps(1000)


def begin(directory, priority, **options):
    return Trained(
        directory, TABLES, priority=priority, overlap="always",
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
        store=cpr_ext.StoreOptions(retention=cpr_ext.Retention(20)),
        **{"schedule": NEVER, **options},
    )  # fmt: skip


def complete_steps(run):
    return [record.last_step for record in run.store.manifest.dense if record.is_complete]


def assert_point(run, directory, step, rows):
    run.die()
    other = Trained(directory, TABLES, seed=9)
    assert other.checkpointer.recover(mode="full").step == step
    assert_same(other.rows(), rows)


def train(run):
    """One step, of a disk that is fast: what is captured is durable before the next."""
    run.train(1)
    snapshot = run.checkpointer._saver.in_flight
    if snapshot is not None and snapshot.state != "capturing":
        snapshot.wait_until_done(30)


@pytest.mark.parametrize("priority", [cpr_ext.AllRows(), cpr_ext.MostFrequentlyUsed(0.5)])
def test_a_point_follows_a_base_that_was_captured_over_several_steps(tmp_path, priority):
    run, expected = begin(tmp_path, priority), {}
    with short_windows():
        while not complete_steps(run):
            train(run)
            expected[run.checkpointer.step_count] = run.rows()
            run.checkpointer._saver._rounds_left = 4  # a busy machine may need more than four
            assert run.checkpointer.step_count < 3000
    (base,) = (record for record in run.store.manifest.rows if record.kind == "base")
    assert base.last_step - base.first_step > 2
    (point,) = complete_steps(run)
    assert point > base.last_step
    assert_point(run, tmp_path, point, expected[point])


def test_no_point_follows_where_the_budget_left_changed_rows_out(tmp_path):
    run = begin(tmp_path, cpr_ext.MostFrequentlyUsed(0.001), lookups=2000)
    saver = run.checkpointer._saver
    while run.checkpointer.metrics.base_snapshots == 0:
        train(run)
    saver._rounds_left = 0
    run.checkpointer.wait()
    run.checkpointer.schedule = cpr_ext.EverySteps(1)
    train(run)
    run.checkpointer.schedule = NEVER
    while (snapshot := saver.in_flight) is not None:
        assert not snapshot.rows.are_all_dirty, "another follows"
        train(run)
    assert saver._rounds_left == 0
    assert not run.store.manifest.newest.is_complete
    run.die()


def test_points_at_given_steps_are_of_these_steps_and_what_is_dirty_is_swept_ahead(
    tmp_path, monkeypatch
):
    schedule = cpr_ext.EverySteps(30, when_busy="wait")
    run = begin(tmp_path, cpr_ext.AllRows(), lookups=300, schedule=schedule)
    monkeypatch.setattr(CaptureAmount, "steps", lambda *_: 12)
    monkeypatch.setattr(claims, "_SHORT_SECONDS", 60.0)  # each is checked on a busy machine, too
    expected = {}
    for _ in range(125):
        train(run)
        expected[run.checkpointer.step_count] = run.rows()
    run.checkpointer.wait()
    points = complete_steps(run)
    assert set(points) >= {31, 61, 91, 121}
    assert run.checkpointer.metrics.partial_snapshots > len(points), "nothing was captured ahead"
    assert_point(run, tmp_path, 121, expected[121])


def test_what_fits_into_a_step_is_learnt_from_snapshots():
    model = torch.nn.Embedding(1000, 8, sparse=True)
    tables = find_tables(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    updates = [0]
    names = {tables[0].name: tables[0].array_names()}
    of_rows = (lambda: updates[0], lambda: names, 1 << 20)
    amount = CaptureAmount(tables, cpr_ext.AllRows(), {*names}, *of_rows, overlaps=True)
    assert not amount.fits("base")  # nothing was measured
    amount.begin()
    amount.note_committed("base", 32_000, 4, has_all=True)
    assert not amount.fits("base")
    updates[0] = 100
    assert amount.bound("partial") == 100 * 32
    assert amount.fits("partial")
    updates[0] = 500
    assert not amount.fits("partial")
    assert amount.steps("partial") == 2
    amount.forget()
    assert amount.bound("partial") == 32_000
    in_step = CaptureAmount(tables, cpr_ext.AllRows(), set(), *of_rows, overlaps=False)
    assert in_step.fits("base")
