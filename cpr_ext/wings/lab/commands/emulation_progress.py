"""The progress bar of an emulation: all runs together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cpr_ext.wings.lab.commands.progress import SampleBar

if TYPE_CHECKING:
    from cpr_ext.wings.lab.emulation.emulation import Standing


class EmulationBar(SampleBar):
    """Shows samples trained and runs finished on stderr; messages go above it."""

    def show(self, standing: Standing) -> None:
        """Take note of how far the runs have come."""
        if self._disable:
            return
        bar = self._open(standing.total_samples)
        if standing.message:
            bar.write(standing.message, file=sys.stderr)
        bar.total = standing.total_samples
        bar.set_postfix_str(f"{standing.runs}/{standing.total_runs} runs", refresh=False)
        bar.n = standing.samples  # full recovery goes back
        bar.update(0)
