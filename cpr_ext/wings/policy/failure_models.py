"""When failures come: distributions of the time between two failures of a job, in hours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpr_ext.errors import UsageError
from cpr_ext.wings.policy.checks import require_positive

FloatArray = NDArray[np.float64]


class FailureModel(ABC):
    """Independent, equally distributed times between failures."""

    @property
    @abstractmethod
    def mean_hours(self) -> float:
        """Mean time between failures, MTBF."""

    @property
    @abstractmethod
    def squared_variation(self) -> float:
        """Variance over squared mean: 1 for a constant hazard, below 1 for wear."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:
        """Return times between failures in hours, float64 of shape ``size``."""

    @abstractmethod
    def stretched(self, factor: float) -> FailureModel:
        """Return the same distribution with every time multiplied by ``factor``."""

    def scaled(self, nodes_from: int, nodes_to: int) -> FailureModel:
        """Return the model of a job on ``nodes_to`` nodes, from one seen on ``nodes_from``.

        MTBF falls as 1/nodes, as it does for independent nodes of near-constant hazard.

        Raises:
            UsageError: a number of nodes below 1.
        """
        if nodes_from < 1 or nodes_to < 1:
            raise UsageError(f"cannot scale from {nodes_from} to {nodes_to} nodes; needed: 1 each")
        return self.stretched(nodes_from / nodes_to)


@dataclass(frozen=True)
class ExponentialFailures(FailureModel):
    """Constant hazard: what happened before does not matter."""

    mtbf_hours: float

    def __post_init__(self) -> None:
        require_positive({"mtbf_hours": self.mtbf_hours})

    @property
    def mean_hours(self) -> float:  # noqa: D102
        return self.mtbf_hours

    @property
    def squared_variation(self) -> float:  # noqa: D102
        return 1.0

    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:  # noqa: D102
        return rng.exponential(self.mtbf_hours, size)

    def stretched(self, factor: float) -> ExponentialFailures:  # noqa: D102
        return ExponentialFailures(self.mtbf_hours * factor)


@dataclass(frozen=True)
class GammaFailures(FailureModel):
    """Gamma distribution; ``shape`` 1 is exponential, above 1 failures come more evenly."""

    shape: float
    scale_hours: float

    def __post_init__(self) -> None:
        require_positive({"shape": self.shape, "scale_hours": self.scale_hours})

    @property
    def mean_hours(self) -> float:  # noqa: D102
        return self.shape * self.scale_hours

    @property
    def squared_variation(self) -> float:  # noqa: D102
        return 1 / self.shape

    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:  # noqa: D102
        return rng.gamma(self.shape, self.scale_hours, size)

    def stretched(self, factor: float) -> GammaFailures:  # noqa: D102
        return GammaFailures(self.shape, self.scale_hours * factor)


@dataclass(frozen=True)
class EmpiricalFailures(FailureModel):
    """Times that were seen, drawn again.

    Attributes:
        times_hours: times between failures.
        weights: how likely each is; equally if empty. Made to sum to 1.
        relative_spread: each drawn time is shortened or lengthened by up to this share of it; so
            times noted in whole hours do not fall in step with saves; 0: exactly as seen.
    """

    times_hours: tuple[float, ...]
    weights: tuple[float, ...] = ()
    relative_spread: float = 0.0

    def __post_init__(self) -> None:
        times = tuple(float(time) for time in self.times_hours)
        if not times:
            raise UsageError("EmpiricalFailures needs at least one time to failure")
        for time in times:
            require_positive({"a time to failure": time})
        if not 0 <= self.relative_spread < 1:
            raise UsageError(f"relative_spread is {self.relative_spread}; allowed: 0 to below 1")
        weights = np.asarray(self.weights if len(self.weights) else np.ones(len(times)), float)
        if len(weights) != len(times) or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise UsageError(
                f"{len(weights)} weights for {len(times)} times; needed: one each, none negative, "
                "not all 0"
            )
        object.__setattr__(self, "times_hours", times)
        object.__setattr__(self, "weights", tuple((weights / weights.sum()).tolist()))

    @property
    def mean_hours(self) -> float:  # noqa: D102
        return float(np.dot(self.times_hours, self.weights))

    @property
    def squared_variation(self) -> float:  # noqa: D102
        squares = float(np.dot(np.square(self.times_hours), self.weights))
        squares *= 1 + self.relative_spread**2 / 3
        return max(0.0, squares / self.mean_hours**2 - 1)

    def draw(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> FloatArray:  # noqa: D102
        drawn = rng.choice(np.asarray(self.times_hours), size, p=np.asarray(self.weights))
        if self.relative_spread:
            drawn *= rng.uniform(1 - self.relative_spread, 1 + self.relative_spread, size)
        return drawn

    def stretched(self, factor: float) -> EmpiricalFailures:  # noqa: D102
        times = tuple(time * factor for time in self.times_hours)
        return EmpiricalFailures(times, self.weights, self.relative_spread)


def draw_failure_times(
    model: FailureModel, total_hours: float, rng: np.random.Generator
) -> FloatArray:
    """Return one failure history: moments of failure in hours since the start, ascending.

    Returns:
        float64 of shape (failures,), each in (0, ``total_hours``); empty if none came.

    Raises:
        UsageError: ``total_hours`` is not above 0.
    """
    require_positive({"total_hours": total_hours})
    chunk = max(8, int(1.5 * total_hours / model.mean_hours) + 8)
    times = np.empty(0)
    while times.size == 0 or times[-1] < total_hours:
        start = times[-1] if times.size else 0.0
        times = np.concatenate((times, start + np.cumsum(model.draw(rng, chunk))))
    return times[times < total_hours]
