"""Means with their uncertainty, over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpr_ext.errors import UsageError

CONFIDENCE = 0.95
_RESAMPLES = 10_000
_RESAMPLING_SEED = 1


@dataclass(frozen=True)
class Estimate:
    """A mean over ``count`` seeds, and the interval that holds the true one with 95 %.

    ``low`` and ``high`` are nan for one seed, which has no spread.
    """

    mean: float
    low: float
    high: float
    count: int

    @property
    def includes_zero(self) -> bool:
        """Whether zero is within the interval; True if the bounds are nan."""
        return not (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Line:
    """A least-squares line ``slope * x + intercept`` and Pearson's correlation of what it fits."""

    slope: float
    intercept: float
    correlation: float
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and Student-t interval of independent values.

    Raises:
        UsageError: there is no value.
    """
    if not len(values):
        raise UsageError("a mean needs at least one value")
    array = np.asarray(values, dtype=float)
    mean, count = float(array.mean()), len(array)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    from scipy.stats import t

    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1) * array.std(ddof=1) / math.sqrt(count))
    return Estimate(mean, mean - half, mean + half, count)


def estimate_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Ratio of the means of paired values, with a percentile bootstrap interval over the pairs.

    Deterministic. The bounds are nan for one pair, or where resampled denominators come to 0 or
    below, so that the ratio has no meaning.

    Raises:
        UsageError: no pair, or values without a partner.
    """
    if not len(numerators) or len(numerators) != len(denominators):
        raise UsageError(f"{len(numerators)} values and {len(denominators)} make no pairs")
    upper, lower = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    count = len(upper)
    mean = float(upper.mean() / lower.mean()) if lower.mean() else math.nan
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    picks = np.random.default_rng(_RESAMPLING_SEED).integers(count, size=(_RESAMPLES, count))
    bottoms = lower[picks].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    if float(np.mean(bottoms <= 0)) > tail:
        return Estimate(mean, math.nan, math.nan, count)
    ratios = _divide(upper[picks].mean(axis=1), bottoms)
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), count)


def _divide(
    upper: npt.NDArray[np.float64], lower: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    return np.divide(upper, lower, out=np.full_like(upper, np.inf), where=lower > 0)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Fit a line; return None for fewer than three points, or constant ``x`` or ``y``."""
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    correlation = float(np.corrcoef(x, y)[0, 1])
    return Line(float(slope), float(intercept), correlation, len(x))
