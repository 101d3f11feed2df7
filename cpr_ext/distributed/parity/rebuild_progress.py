"""Shows how far a rebuild of rows or parity is."""

from __future__ import annotations

import time

from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.metrics import ParityMetrics

logger = logger_of("parity")


class RebuildProgress:
    """Of one worker, over all rebuilds of its group.

    Args:
        rank: of the worker.
        metrics: are kept up to date.
    """

    def __init__(self, rank: int, metrics: ParityMetrics) -> None:
        self._rank = rank
        self._metrics = metrics
        self._num_rows = 0
        self._begun = 0.0

    def begin(self, num_bytes: int, own_rows: int = 0) -> None:
        """Begin a rebuild of so many bytes, for ``own_rows`` of this worker."""
        self._num_rows, self._begun = own_rows, time.perf_counter()
        self._metrics.begin_rebuild(num_bytes)

    def note(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._metrics.note_rebuilt(num_bytes)

    def end(self) -> None:
        """Note that all is done, so that the group is protected."""
        self._metrics.end_rebuild()
        if self._num_rows:
            logger.info(
                "worker %d was rebuilt from its peers' memory: %d rows in %.1f s; its parity group "
                "is protected again",
                *(self._rank, self._num_rows, time.perf_counter() - self._begun),
            )
