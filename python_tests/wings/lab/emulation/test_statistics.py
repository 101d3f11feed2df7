import math

import numpy as np
import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.summary import estimate, estimate_ratio


def test_the_interval_of_a_textbook_sample():
    # n 5, mean 3, s sqrt(2.5); t(0.975, 4) = 2.7764
    found = estimate([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert found.high - found.mean == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)
    assert found.low == pytest.approx(6 - found.high)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = [estimate(rng.normal(1.0, 2.0, 10)) for _ in range(600)]
    covered = np.mean([found.low <= 1.0 <= found.high for found in draws])
    assert covered == pytest.approx(0.95, abs=0.03)


def test_one_seed_tells_no_spread():
    found = estimate([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.low)
    with pytest.raises(UsageError):
        estimate([])


def test_a_ratio_to_nothing_has_no_interval():
    assert math.isnan(estimate_ratio([1, 2], [0, 0]).mean)
    assert math.isnan(estimate_ratio([1, 2, 3], [-1, 1, 0.5]).low)
    with pytest.raises(UsageError, match="pairs"):
        estimate_ratio([1], [1, 2])
