"""Shows how far a rebuild of rows or parity is."""

from __future__ import annotations

import time

from cpr_ext.distributed.identity.supervision import show_progress
from cpr_ext.metrics.parity_metrics import ParityMetrics
from cpr_ext.runtime.log_text import logger_of

logger = logger_of("parity")


class RebuildProgress:
    """Of one worker, over all rebuilds of its group.

    A worker whose own rows are rebuilt shows that to ``cpr launch``, too.

    Args:
        rank: of the worker.
        metrics: are kept up to date.
    """

    def __init__(self, rank: int, metrics: ParityMetrics) -> None:
        self._rank = rank
        self._metrics = metrics
        self._num_rows = 0
        self._begun = 0.0
        self._percent = -1  # shown last

    def begin(self, num_bytes: int, own_rows: int = 0) -> None:
        """Begin a rebuild of so many bytes, for ``own_rows`` of this worker."""
        self._num_rows, self._begun, self._percent = own_rows, time.perf_counter(), -1
        self._metrics.begin_rebuild(num_bytes)

    def note(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        metrics = self._metrics
        metrics.note_rebuilt(num_bytes)
        percent = round(100 * metrics.rebuild_progress)
        if self._num_rows and percent != self._percent:  # as it replaces a file
            self._percent = percent
            show_progress(
                f"worker {self._rank} is rebuilt from its peers' memory: "
                f"{percent} % of {metrics.bytes_to_rebuild / 1e6:.1f} MB"
            )

    def end(self) -> None:
        """Note that all is done, so that the group is protected."""
        self._metrics.end_rebuild()
        if self._num_rows:
            text = (
                f"worker {self._rank} was rebuilt from its peers' memory: {self._num_rows} rows in "
                f"{time.perf_counter() - self._begun:.1f} s; its parity group is protected again"
            )
            logger.info(text)
            show_progress(text)
