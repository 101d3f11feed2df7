"""Memory, network and rebuild time of parity, by hand and in general."""

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import ParityCosts
from cpr_ext.wings.policy.parity_costs import (
    extra_memory_share,
    link_bytes,
    rebuild_hours,
    step_bytes,
    wire_share,
)


def test_figures_by_hand():
    assert [extra_memory_share(g) for g in (2, 4, 8)] == [1, pytest.approx(1 / 3), 1 / 7]
    # Kaggle: 21,000 rows of 16 floats and row-wise Adagrad's sum, 8 bytes of id each.
    assert step_bytes(21_000, 68) == 21_000 * 76
    assert link_bytes(21_000, 68, 4) == 5250 * 76
    assert wire_share(4e5, step_seconds=0.1, link_bytes_per_second=1e9) == pytest.approx(0.004)
    # 3 + 1: 36 GB decoded and 12 GB encoded at 1 GB/s.
    assert rebuild_hours(36e9, 4, 1e9) == pytest.approx(48 / 3600)
    assert ParityCosts(2, 0, 0).name == "mirror"
    assert ParityCosts(8, 0, 0).name == "7 + 1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"group_size": 1}, "group_size is 1"),
        ({"steady_share": -0.1}, "steady_share is -0.1"),
        ({"rebuild_hours": float("nan")}, "rebuild_hours is nan"),
        ({"rebuild_stall": 1.5}, "rebuild_stall is 1.5"),
    ],
)
def test_costs_out_of_range_are_named(change, named):
    given = {"group_size": 4, "steady_share": 0.03, "rebuild_hours": 0.1, **change}
    with pytest.raises(UsageError, match=named):
        ParityCosts(**given)


def test_what_possible_group_sizes_are_is_said():
    with pytest.raises(UsageError, match=r"possible here: \[2, 3, 6\]"):
        ParityCosts(4, 0, 0).require_fit(6)
