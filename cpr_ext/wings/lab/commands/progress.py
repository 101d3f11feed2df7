"""The progress bar of a training run."""

from __future__ import annotations

import math
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from typing_extensions import Self

    from cpr_ext.wings.lab.dlrm.trainer import TrainingProgress


class SampleBar:
    """A bar of samples on stderr, from the first time something is shown."""

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

    def _open(self, total: int | None, initial: int = 0) -> Any:
        if self._bar is None:
            self._bar = tqdm(
                total=total,
                initial=initial,
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.2,
            )
        return self._bar


class ProgressBar(SampleBar):
    """Shows samples, speed, loss, snapshots and stalls on stderr; messages go above it."""

    def show(self, progress: TrainingProgress) -> None:
        """Take note of where training is."""
        if self._disable:
            return
        bar = self._open(progress.total_samples, progress.num_samples)
        if progress.message:
            bar.write(progress.message, file=sys.stderr)
        if progress.num_samples < bar.n:  # training went back
            bar.n = progress.num_samples
        metrics = progress.metrics
        snapshots = metrics.base_snapshots + metrics.partial_snapshots
        loss = "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}"
        bar.set_postfix_str(
            f"loss {loss}, {snapshots} snapshots, stalled {metrics.stall_seconds:.2f} s",
            refresh=False,
        )
        bar.update(progress.num_samples - bar.n)
