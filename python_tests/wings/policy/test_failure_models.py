"""Distributions of the time between failures, and histories drawn from them."""

import numpy as np
import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy import (
    EmpiricalFailures,
    ExponentialFailures,
    GammaFailures,
    draw_failure_times,
)

MODELS = [
    ExponentialFailures(mtbf_hours=28),
    GammaFailures(shape=0.7, scale_hours=40),
    GammaFailures(shape=4, scale_hours=7),
    EmpiricalFailures((7.0, 21.0, 84.0), (1, 2, 1)),
    EmpiricalFailures((28.0,)),
    EmpiricalFailures((28.0,), relative_spread=0.5),
]


@pytest.mark.parametrize("model", MODELS)
def test_twice_the_nodes_fail_twice_as_often(model):
    scaled = model.scaled(8, 16)
    assert scaled.mean_hours == pytest.approx(model.mean_hours / 2)
    assert scaled.squared_variation == pytest.approx(model.squared_variation)
    assert type(scaled) is type(model)
    assert scaled.scaled(16, 8).mean_hours == pytest.approx(model.mean_hours)
    draws = [m.draw(np.random.default_rng(3), 50) for m in (model, scaled)]
    assert draws[0] / 2 == pytest.approx(draws[1])


def test_models_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="mtbf_hours is -28"):
        ExponentialFailures(-28)
    with pytest.raises(UsageError, match="shape is 0"):
        GammaFailures(0, 1)
    with pytest.raises(UsageError, match="at least one time"):
        EmpiricalFailures(())
    with pytest.raises(UsageError, match="a time to failure is -2"):
        EmpiricalFailures((1.0, -2.0))
    with pytest.raises(UsageError, match="relative_spread is 1"):
        EmpiricalFailures((1.0,), relative_spread=1)
    with pytest.raises(UsageError, match="1 weights for 2 times"):
        EmpiricalFailures((1.0, 2.0), (1.0,))
    with pytest.raises(UsageError, match="from 0 to 8 nodes"):
        ExponentialFailures(28).scaled(0, 8)
    with pytest.raises(UsageError, match="total_hours is 0"):
        draw_failure_times(MODELS[0], 0, np.random.default_rng(0))
