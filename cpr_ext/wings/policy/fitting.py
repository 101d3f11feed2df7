"""A failure model from a log of jobs, by maximum likelihood; jobs that did not fail count too.

Needs scipy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.policy.failure_log import FailureLog
from cpr_ext.wings.policy.failure_models import (
    EmpiricalFailures,
    ExponentialFailures,
    FailureModel,
    FloatArray,
    GammaFailures,
)
from cpr_ext.wings.policy.scipy_stats import stats

ModelName = Literal["auto", "exponential", "gamma", "empirical"]
_LEAST_FOR_GAMMA = 3  # failures; fewer do not tell two parameters
_RESAMPLES = 1000
_SPREAD = 0.1  # of drawn times: logs note them in coarse units


@dataclass(frozen=True)
class FailureFit:
    """A fitted model and how sure it is.

    Attributes:
        model: the fit.
        num_failures, num_censored: jobs that failed, jobs that ended otherwise.
        mtbf_low_hours, mtbf_high_hours: confidence interval of ``model.mean_hours``.
        confidence: its level.
        interval_method: how the interval was made.
        aic: Akaike's criterion, smaller is better; NaN for the empirical model.
        notes: what to know about it, one sentence each.
    """

    model: FailureModel
    num_failures: int
    num_censored: int
    mtbf_low_hours: float
    mtbf_high_hours: float
    confidence: float
    interval_method: str
    aic: float
    notes: tuple[str, ...] = ()


def fit_failures(
    log: FailureLog, model: ModelName = "auto", *, confidence: float = 0.95, seed: int = 0
) -> FailureFit:
    """Fit a failure model.

    Args:
        model: ``"auto"`` takes exponential or gamma by AIC; ``"empirical"`` draws seen times again.
        confidence: level of the interval, in (0, 1).
        seed: of the resamples that the empirical model's interval is made from.

    Raises:
        DataError: the log holds no failure (the message gives the bound on the MTBF that it still
            allows), or too few for the model.
        UsageError: no such model or confidence, or scipy is missing.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence is {confidence}; it must be between 0 and 1, such as 0.95")
    if not log.num_failures:
        raise DataError(
            f"the log holds no failure in {log.hours.sum():g} hours, so no MTBF can be fitted; it "
            f"is above {log.mtbf_lower_bound_hours():.3g} hours with 95 % confidence: plan with "
            "that as a cautious MTBF"
        )
    match model:
        case "exponential":
            return _fit_exponential(log, confidence)
        case "gamma":
            return _fit_gamma(log, confidence)
        case "empirical":
            return _fit_empirical(log, confidence, seed)
        case "auto":
            return _choose(log, confidence)
    raise UsageError(f"model is {model!r}; allowed: auto, exponential, gamma, empirical")


def _choose(log: FailureLog, confidence: float) -> FailureFit:
    exponential = _fit_exponential(log, confidence)
    if len(np.unique(log.hours[log.failed])) < _LEAST_FOR_GAMMA:
        return exponential
    try:
        gamma = _fit_gamma(log, confidence)
    except DataError:
        return exponential
    return gamma if gamma.aic < exponential.aic else exponential


def _fit_exponential(log: FailureLog, confidence: float) -> FailureFit:
    failures, total_hours = log.num_failures, float(log.hours.sum())
    mtbf_hours = total_hours / failures
    chi2 = stats().chi2
    tail = (1 - confidence) / 2
    return FailureFit(
        ExponentialFailures(mtbf_hours),
        failures,
        log.num_censored,
        float(2 * total_hours / chi2.ppf(1 - tail, 2 * failures + 2)),
        float(2 * total_hours / chi2.ppf(tail, 2 * failures)),
        confidence,
        "chi-squared",
        2 + 2 * failures * (math.log(mtbf_hours) + 1),
    )


def _fit_gamma(log: FailureLog, confidence: float) -> FailureFit:
    seen = log.hours[log.failed]
    if len(np.unique(seen)) < _LEAST_FOR_GAMMA:
        raise DataError(
            f"the log holds {len(np.unique(seen))} different times to failure; a gamma "
            f"distribution needs at least {_LEAST_FOR_GAMMA}: use the exponential model"
        )
    unit = log.hours.sum() / log.num_failures
    scaled = FailureLog(log.hours / unit, log.failed)  # near 1, so that steps below are right

    def loss(parameters: FloatArray) -> float:
        return -_gamma_log_likelihood(scaled, parameters)

    from scipy.optimize import minimize

    start = np.zeros(2)  # log mean, log shape: the exponential fit
    options = {"xatol": 1e-8, "fatol": 1e-9, "maxiter": 2000}
    found = minimize(loss, start, method="Nelder-Mead", options=options)
    mean, shape = np.exp(found.x)
    variance = np.linalg.pinv(_hessian(loss, found.x))[0, 0]
    if not found.success or not 1e-3 < shape < 1e4 or not variance > 0:
        raise DataError(
            f"no gamma distribution fits the log's {log.num_failures} failures (shape {shape:.3g});"
            " use the exponential or the empirical model"
        )
    reach = float(stats().norm.ppf((1 + confidence) / 2)) * math.sqrt(variance)
    return FailureFit(
        GammaFailures(float(shape), float(unit * mean / shape)),
        log.num_failures,
        log.num_censored,
        float(unit * mean * math.exp(-reach)),
        float(unit * mean * math.exp(reach)),
        confidence,
        "Wald, of the logarithm",
        4 + 2 * (float(found.fun) + log.num_failures * math.log(unit)),
    )


def _gamma_log_likelihood(log: FailureLog, parameters: FloatArray) -> float:
    """Return the log-likelihood of log mean and log shape."""
    from scipy.special import gammaincc

    mean, shape = np.exp(np.clip(parameters, -20, 20))
    times = log.hours * shape / mean
    seen, survived = times[log.failed], times[~log.failed]
    normalizer = math.lgamma(shape)
    densities = (shape - 1) * np.log(seen) - seen - normalizer + math.log(shape / mean)
    tails = gammaincc(shape, survived)
    with np.errstate(divide="ignore"):
        # Beyond the range of floats: the leading term of the tail.
        far = (shape - 1) * np.log(survived) - survived - normalizer
        log_tails = np.where(tails > 1e-280, np.log(tails), far)
    return float(densities.sum() + log_tails.sum())


def _hessian(function: Any, at: FloatArray, step: float = 1e-3) -> FloatArray:
    size = len(at)
    steps = np.eye(size) * step
    result = np.empty((size, size))
    for i in range(size):
        for j in range(size):
            result[i, j] = (
                function(at + steps[i] + steps[j])
                - function(at + steps[i] - steps[j])
                - function(at - steps[i] + steps[j])
                + function(at - steps[i] - steps[j])
            ) / (4 * step**2)
    return result


def kaplan_meier(log: FailureLog) -> tuple[FloatArray, FloatArray]:
    """Return times to failure seen, ascending, and the probability of each (Kaplan & Meier 1958).

    What is left of the probability, if the longest job did not fail, goes to that job's time.
    """
    order = np.lexsort((~log.failed, log.hours))  # at one time, failures come first
    hours, failed = log.hours[order], log.failed[order]
    at_risk = np.arange(len(hours), 0, -1)
    survival = np.cumprod(1 - failed / at_risk)
    weights = np.concatenate(([1.0], survival[:-1])) - survival
    weights[-1] += survival[-1]
    seen = weights > 0
    times: FloatArray
    times, where = np.unique(hours[seen], return_inverse=True)
    return times, np.bincount(where, weights[seen]).astype(np.float64)


def _fit_empirical(log: FailureLog, confidence: float, seed: int) -> FailureFit:
    times, weights = kaplan_meier(log)
    longest = log.hours.max()
    notes: tuple[str, ...] = ()
    if not log.failed[log.hours == longest].any():
        left = 1 - weights[times < longest].sum()
        notes = (
            f"The longest job ({longest:g} h) did not fail: {100 * left:.0f} % of the times to "
            "failure are longer, and are taken as that long, so the MTBF is too small.",
        )
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(0, len(log.hours), len(log.hours))
        if log.failed[rows].any():
            means.append(np.dot(*kaplan_meier(FailureLog(log.hours[rows], log.failed[rows]))))
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return FailureFit(
        EmpiricalFailures(tuple(times.tolist()), tuple(weights.tolist()), _SPREAD),
        log.num_failures,
        log.num_censored,
        float(low),
        float(high),
        confidence,
        f"bootstrap of {_RESAMPLES} resamples",
        math.nan,
        notes,
    )
