import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.lab.emulation.statistics import estimate, estimate_ratio, fit_line

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=20)


def test_the_interval_of_a_textbook_sample() -> None:
    # n 5, mean 3, s sqrt(2.5); t(0.975, 4) = 2.7764
    found = estimate([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)
    assert found.low == pytest.approx(6 - found.high)
    assert not found.includes_zero


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    draws = [estimate(rng.normal(1.0, 2.0, 10)) for _ in range(600)]
    covered = np.mean([found.low <= 1.0 <= found.high for found in draws])
    assert covered == pytest.approx(0.95, abs=0.03)


@given(values=numbers)
def test_bounds_enclose_the_mean(values: list[float]) -> None:
    found = estimate(values)
    assert found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(sum(values) / len(values), abs=1e-9)


def test_one_seed_tells_no_spread() -> None:
    found = estimate([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.low)
    assert found.includes_zero
    with pytest.raises(UsageError):
        estimate([])


def test_a_ratio_is_of_the_means_and_its_interval_is_paired() -> None:
    lower = [1.0, 2.0, 3.0, 10.0]
    found = estimate_ratio([value / 4 for value in lower], lower)
    # Each pair has the same ratio, so resampling pairs cannot change it.
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert estimate_ratio([1, 0, 2], [2, 2, 1]) == estimate_ratio([1, 0, 2], [2, 2, 1])
    assert estimate_ratio([1, 0, 2], [2, 2, 1]).mean == pytest.approx(3 / 5)


def test_a_ratio_to_nothing_has_no_interval() -> None:
    assert math.isnan(estimate_ratio([1, 2], [0, 0]).mean)
    assert math.isnan(estimate_ratio([1, 2, 3], [-1, 1, 0.5]).low)
    with pytest.raises(UsageError, match="pairs"):
        estimate_ratio([1], [1, 2])


def test_a_line_and_its_correlation() -> None:
    line = fit_line([0, 1, 2, 3], [1, 3, 5, 7])
    assert line is not None
    assert (line.slope, line.intercept, line.correlation) == pytest.approx((2, 1, 1))
    assert fit_line([1, 1, 1], [1, 2, 3]) is None
    assert fit_line([1, 2], [1, 2]) is None
