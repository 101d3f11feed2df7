"""The progress bar of a training run."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from cpr_ext.dlrm.trainer import Progress


class ProgressBar:
    """Shows samples, speed, loss, snapshots and stalls on stderr; messages go above it."""

    def __init__(self, *, disable: bool) -> None:
        self._disable = disable
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, progress: Progress) -> None:
        """Take note of where training is."""
        if self._disable:
            return
        if self._bar is None:
            self._bar = tqdm(
                total=progress.total_samples,
                initial=progress.num_samples,
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.2,
            )
        if progress.message:
            self._bar.write(progress.message)
        if progress.num_samples < self._bar.n:  # training went back
            self._bar.n = progress.num_samples
        metrics = progress.metrics
        snapshots = metrics.base_snapshots + metrics.partial_snapshots
        loss = "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}"
        self._bar.set_postfix_str(
            f"loss {loss}, {snapshots} snapshots, stalled {metrics.stall_seconds:.2f} s",
            refresh=False,
        )
        self._bar.update(progress.num_samples - self._bar.n)
