"""Bytes of rounded rows, the bits for expected restores, and what a plan makes of them."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.state import precision as stored
from cpr_ext.wings.policy import (
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
from cpr_ext.wings.policy.precision import PRECISIONS, weight_bytes

JOB = JobSize(56, 8)
COSTS = JobCosts(0.1, 0.05, 0.05, 0.05)


def test_the_precisions_are_those_of_a_snapshot():
    assert PRECISIONS == stored.PRECISIONS
    with pytest.raises(UsageError, match="precision is 'int4'; allowed: float32"):
        weight_bytes(16, "int4")


def test_the_rule_of_expected_restores():
    found = [precision_for_restores(count) for count in (0, 5780, 5781)]
    assert found == ["int8", "int8", "float16"]
    with pytest.raises(UsageError, match="restores is -1"):
        precision_for_restores(-1)


def test_a_failure_restores_the_rows_of_lost_shards():
    assert expected_restores(JobSize(56, 8), 28) == 2 / 8
    assert expected_restores(JobSize(50, 18, 4), 10) == pytest.approx(5 * 4 / 18)


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
    int8 = figures[-1]
    share = bytes_share([RowSizes(1, 64)], "int8")
    written = share if state_bytes is None else (100 * share + 200) / (100 + 200)
    assert int8.written_share == pytest.approx(written)
