"""What a run costs: stall and bytes scaled to saving everything once, speed, load times."""

import pytest
import torch

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.saving.run_state import CostMeter
from cpr_ext.state.table import Table
from python_tests.helpers import Trained


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only move when a test says so."""
    now = [100.0]
    monkeypatch.setattr("cpr_ext.saving.run_state.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def meter(clock):
    tables = [
        Table(name, torch.nn.Parameter(torch.zeros(rows, 4)), None, [])
        for name, rows in (("big", 1000), ("small", 10))
    ]
    return CostMeter(tables, {"big"}, 0.25, num_shards=4)


def test_a_whole_save_costs_the_stall_per_byte_times_the_bytes_of_a_base(meter):
    meter.note_step(10, 0.1, is_saving=False)  # counting lookups alone
    meter.note_step(10, 0.5, is_saving=True)
    meter.note_step(10, 0.3, is_saving=True)
    meter.note_snapshot(20_000, is_base=True)
    assert meter.costs().save_hours == pytest.approx((0.4 + 0.2) / 3600)
    assert meter.costs().prioritized_bytes == 16_000
    assert meter.costs().other_bytes == 4000
    meter.note_step(10, 0.3, is_saving=True)
    meter.note_snapshot(5000, is_base=False)
    # 0.8 s for 25 kB; a base has 20 kB.
    assert meter.costs().save_hours == pytest.approx(0.8 * 20 / 25 / 3600)


def test_a_failed_snapshot_and_one_that_held_no_step_tell_nothing(meter):
    meter.note_step(10, 0.5, is_saving=True)
    meter.note_failed_snapshot()
    meter.note_snapshot(20_000, is_base=True)
    assert meter.costs().save_hours is None
    meter.note_step(10, 0.5, is_saving=True)
    meter.note_snapshot(20_000, is_base=True)
    assert meter.costs().save_hours == pytest.approx(0.5 / 3600)


def test_speed_is_that_of_training_without_recoveries(meter, clock):
    for _ in range(19):
        meter.note_step(100, 0.0, is_saving=False)
    clock[0] += 30
    assert meter.costs().samples_per_hour is None  # the first steps are slower
    meter.note_step(100, 0.0, is_saving=False)
    clock[0] += 6
    meter.note_recovery(6.0, bytes_read=10, of_shards=True)
    assert meter.costs().samples_per_hour == pytest.approx(1900 / (30 / 3600))


def test_load_times_are_those_of_the_last_recovery_that_read_something(meter):
    meter.note_recovery(9.0, bytes_read=0, of_shards=False)
    assert meter.costs().load_hours is None
    meter.note_recovery(3.6, bytes_read=10, of_shards=False)
    meter.note_recovery(1.8, bytes_read=10, of_shards=True)
    assert meter.costs().load_hours == pytest.approx(0.001)
    assert meter.costs().load_shard_hours == pytest.approx(0.0005)


class Observed(cpr_ext.EverySteps):
    def observe(self, costs):
        object.__setattr__(self, "costs", costs)


def test_what_is_rounded_counts_as_training_has_it(tmp_path):
    seen = []
    for precision in ("float32", "int8"):
        schedule = Observed(1000)
        options = StoreOptions(precision=Precision(base=precision))
        run = Trained(tmp_path / precision, {"a": (400, 16)}, schedule=schedule, store=options)
        run.train(1)
        run.checkpointer.wait()
        run.train(1)
        seen.append(schedule.costs.prioritized_bytes + schedule.costs.other_bytes)
        assert run.checkpointer.metrics.bytes_written > 0
        run.checkpointer.close()
    exact, rounded = seen
    assert exact > 2 * 400 * 16 * 4
    assert abs(exact - rounded) < 400  # of the header of its dense part
