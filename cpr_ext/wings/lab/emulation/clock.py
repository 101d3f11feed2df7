"""The emulated clock: samples trained, as hours of the cluster's job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpr_ext.errors import UsageError


@dataclass(frozen=True)
class EmulatedClock:
    """Maps a training run onto a job of ``job_hours``; time runs with the samples trained.

    The clock counts useful training. The times of saving, loading and waiting are charged
    separately, and samples that full recovery trains again do not advance it a second time.

    Attributes:
        job_hours: useful training time of the job, T_total.
        total_samples: samples of the whole run, S_total.
        samples_per_step: samples of one training step (the last step may have fewer).

    Raises:
        UsageError: no hours, or no whole sample.
    """

    job_hours: float
    total_samples: int
    samples_per_step: int

    def __post_init__(self) -> None:
        if not (self.job_hours > 0 and math.isfinite(self.job_hours)):
            raise UsageError(f"job hours are {self.job_hours}; they must be positive")
        if self.total_samples < 1 or self.samples_per_step < 1:
            raise UsageError(
                f"total_samples is {self.total_samples} and samples_per_step "
                f"{self.samples_per_step}; both must be at least 1"
            )

    @property
    def total_steps(self) -> int:
        """Training steps of the whole run."""
        return math.ceil(self.total_samples / self.samples_per_step)

    @property
    def hours_per_step(self) -> float:
        """Emulated hours that one whole training step stands for."""
        return self.job_hours * self.samples_per_step / self.total_samples

    def hours(self, num_samples: int) -> float:
        """Return emulated hours after ``num_samples`` samples."""
        return self.job_hours * num_samples / self.total_samples

    def step_at(self, hours: float) -> int:
        """Return the training step, counted from 1, that ends nearest to ``hours``.

        Raises:
            UsageError: before the start or after the end of the job.
        """
        if not 0 <= hours <= self.job_hours:
            raise UsageError(f"hour {hours} is not within the job, 0 to {self.job_hours} hours")
        return min(max(1, round(hours / self.hours_per_step)), self.total_steps)

    def interval_steps(self, interval_hours: float) -> int:
        """Return an interval in whole steps, the nearest number.

        Raises:
            UsageError: it is less than half a step, so that this run cannot show it.
        """
        if not interval_hours > 0:
            raise UsageError(f"interval is {interval_hours} hours; it must be positive")
        steps = interval_hours / self.hours_per_step
        if steps < 0.5:
            raise UsageError(
                f"a save every {interval_hours:.3g} h cannot be played: one training step stands "
                f"for {self.hours_per_step:.3g} h. Train more steps (epochs, or a smaller batch)"
            )
        return round(min(steps, self.total_steps)) or 1
