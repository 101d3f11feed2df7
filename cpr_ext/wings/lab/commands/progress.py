"""Progress bars on stderr, from the first time something is shown; messages go above them."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from typing_extensions import Self

    from cpr_ext.wings.lab.dlrm.trainer import TrainingProgress
    from cpr_ext.wings.lab.emulation.emulation import Standing


class _Bar:
    unit = ""

    def __init__(self, *, disable: bool) -> None:
        self._disable = disable
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _move(self, done: int, total: int | None, message: str) -> Any:
        """Show how much is done; it may be less than before."""
        if self._bar is None:
            self._bar = tqdm(
                total=total,
                initial=done,
                unit=f" {self.unit}",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.2,
            )
        if message:
            self._bar.write(message, file=sys.stderr)
        self._bar.n = min(self._bar.n, done)
        self._bar.update(done - self._bar.n)
        return self._bar


class RunBar(_Bar):
    """Runs of an emulation."""

    unit = "runs"

    def show(self, standing: Standing) -> None:
        """Take note of how far the runs have come."""
        if not self._disable:
            self._move(standing.runs, standing.total_runs, standing.message)


class ProgressBar(_Bar):
    """Samples, speed, loss, snapshots and stalls of a training run."""

    unit = "samples"

    def show(self, progress: TrainingProgress) -> None:
        """Take note of where training is."""
        if self._disable:
            return
        bar = self._move(progress.num_samples, progress.total_samples, progress.message)
        metrics = progress.metrics
        snapshots = metrics.base_snapshots + metrics.partial_snapshots
        loss = "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}"
        bar.set_postfix_str(
            f"loss {loss}, {snapshots} snapshots, stalled {metrics.stall_seconds:.2f} s",
            refresh=False,
        )
