"""What a run costs: stall and bytes scaled to saving everything once, speed, load times."""

import pytest
import torch

from cpr_ext.saving.run_state import CostMeter
from cpr_ext.state.precision import Precision
from cpr_ext.state.table import Table


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


def test_rounded_rows_count_as_if_they_were_float32(clock):
    weight = torch.nn.Parameter(torch.zeros(1000, 16))
    meter = CostMeter([Table("big", weight, None, [])], {"big"}, 0.25, 4, Precision(partial="int8"))
    meter.note_snapshot(66_000, is_base=True)
    meter.note_step(10, 0.3, is_saving=True)
    meter.note_snapshot(8000, is_base=False)
    # 0.3 s for a quarter of the rows, 16 kB as they are copied, and 2 kB that are not rounded.
    assert meter.costs().save_hours == pytest.approx(66 / 18 * 0.3 / 3600)
    assert (meter.costs().prioritized_bytes, meter.costs().other_bytes) == (64_000, 2000)
    halves = CostMeter(
        [Table("big", weight, None, [])], {"big"}, 0.25, 4, Precision(base="float16")
    )
    halves.note_snapshot(36_000, is_base=True)
    assert halves.costs().other_bytes == 0


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
