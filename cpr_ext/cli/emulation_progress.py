"""The progress bar of an emulation: all runs together."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from cpr_ext.emulation.emulation import Standing


class EmulationBar:
    """Shows samples trained and runs finished on stderr; messages go above it."""

    def __init__(self, *, disable: bool) -> None:
        self._disable = disable
        self._bar: Any = None

    def __enter__(self) -> EmulationBar:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, standing: Standing) -> None:
        """Take note of how far the runs have come."""
        if self._disable:
            return
        if self._bar is None:
            self._bar = tqdm(
                total=standing.total_samples,
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                mininterval=0.2,
            )
        if standing.message:
            self._bar.write(standing.message)
        self._bar.total = standing.total_samples
        self._bar.set_postfix_str(f"{standing.runs}/{standing.total_runs} runs", refresh=False)
        self._bar.n = standing.samples  # full recovery goes back
        self._bar.update(0)
