"""Bytes of rounded rows, the bits for expected restores, and what a plan makes of them."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.policy import (
    ExponentialFailures,
    JobCosts,
    JobSize,
    Planner,
    RowSizes,
    StateBytes,
    bytes_share,
    compare_precisions,
    expected_restores,
    precision_for_restores,
)
from cpr_ext.policy.precision import PRECISIONS, mean_row_bytes, weight_bytes
from cpr_ext.state import precision as stored

JOB = JobSize(56, 8)
COSTS = JobCosts(0.1, 0.05, 0.05, 0.05)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_take_the_bytes_that_a_segment_stores(precision):
    for dim in range(1, 130):
        name = stored.precision_of_row(dim, precision)
        assert weight_bytes(dim, precision) == stored.stored_row_bytes(dim, name)


def test_the_precisions_are_those_of_a_snapshot():
    assert PRECISIONS == stored.PRECISIONS
    with pytest.raises(UsageError, match="precision is 'int3'; allowed: float32"):
        weight_bytes(16, "int3")


def test_rows_of_several_sizes_count_by_their_number():
    rows = [RowSizes(3, 16), RowSizes(1, 64, state_bytes=256)]
    ids = (2 + 3) / 8  # bits, as python_tests/csrc/core/test_packed_row_ids.py has them
    assert mean_row_bytes(rows, "int8", 0.125) == (3 * (24 + 4) + 72 + 256) / 4 + ids
    assert mean_row_bytes([RowSizes(1, 0, 40)], "int4", 0.5) == 40 + 3 / 8
    assert mean_row_bytes([RowSizes(1, 16)], "float32", 0.125) == 64 + 4 + 8
    assert bytes_share(rows, "float32", 0.125) == 1


def test_the_issues_limits_follow_from_the_bytes():
    """12.5 % of the rows, over a full float32 checkpoint with row-wise state."""
    for dim, precision, at_least in (
        (16, "int4", 25),
        (64, "int4", 45),
        (16, "int8", 15),
        (64, "int8", 25),
    ):
        full = 4 * dim + 4
        assert full / (0.125 * mean_row_bytes([RowSizes(1, dim)], precision, 0.125)) > at_least


def test_the_rule_of_expected_restores():
    assert [precision_for_restores(count) for count in (0, 20, 20.1, 5780, 5781)] == [
        "int4",
        "int4",
        "int8",
        "int8",
        "float16",
    ]
    with pytest.raises(UsageError, match="restores is -1"):
        precision_for_restores(-1)


def test_a_failure_restores_the_rows_of_lost_shards():
    assert expected_restores(JobSize(56, 8), 28) == 2 / 8
    assert expected_restores(JobSize(50, 18, 4), 10) == pytest.approx(5 * 4 / 18)


def test_rounded_rows_make_a_priority_cheaper_and_nothing_else():
    exact = Planner(JOB, COSTS, ExponentialFailures(28)).plan(0.1)
    rounded = Planner(JOB, COSTS, ExponentialFailures(28), row_share=0.25).plan(0.1)
    for one, other in zip(exact.strategies, rounded.strategies, strict=True):
        factor = 0.25 if one.name in ("CPR-SCAR", "CPR-MFU", "CPR-SSU") else 1
        assert other.expected.overhead.save_hours == pytest.approx(
            factor * one.expected.overhead.save_hours
        )
        assert (other.expected.pls, other.interval_hours) == (one.expected.pls, one.interval_hours)


def test_time_by_rows_keeps_the_cost_and_writes_fewer_bytes():
    state = StateBytes(800, 200)
    options = {"state_bytes": state, "row_share": 0.25}
    by_rows = Planner(JOB, COSTS, ExponentialFailures(28), charges="rows", **options)
    by_bytes = Planner(JOB, COSTS, ExponentialFailures(28), **options)
    assert by_rows.pattern.cost_share == (100 + 200) / 1000
    assert by_bytes.pattern.cost_share == (25 + 200) / 1000
    for planner in (by_rows, by_bytes):
        assert planner.bytes_per_hour(8, planner.pattern) == 25 + 200


@pytest.mark.parametrize("state_bytes", [None, StateBytes(800, 200)])
def test_the_same_bytes_per_hour_buy_a_shorter_interval_and_less_pls(state_bytes):
    planner = Planner(JOB, COSTS, ExponentialFailures(28), state_bytes=state_bytes)
    figures = compare_precisions(planner, 0.1, [RowSizes(1, 64)])
    assert [each.precision for each in figures] == list(PRECISIONS)
    exact = figures[0]
    assert exact.written_share == 1
    for each in figures[1:]:
        assert each.pls < exact.pls
        assert each.overhead_fraction < exact.overhead_fraction
        assert each.save_every_hours == pytest.approx(each.written_share * exact.save_every_hours)
    int4 = figures[-1]
    share = bytes_share([RowSizes(1, 64)], "int4", 0.125)
    written = share if state_bytes is None else (100 * share + 200) / (100 + 200)
    assert int4.written_share == pytest.approx(written)
