"""How far a recovery is: a line in the log every ten seconds."""

from __future__ import annotations

import time

from cpr_ext.runtime.log_text import logger_of

logger = logger_of("recovery")

_SECONDS_BETWEEN_LINES = 10.0


class RecoveryProgress:
    """Logs how much of the files is read, at most every ten seconds.

    Args:
        total_bytes: of the files that are read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._began = self._logged = time.monotonic()

    def __call__(self, bytes_read: int) -> None:
        """Note that so many bytes are read by now, in all."""
        now = time.monotonic()
        if now - self._logged < _SECONDS_BETWEEN_LINES:
            return
        self._logged = now
        seconds = now - self._began
        left = max(0, self._total_bytes - bytes_read)
        logger.info(
            "recovering: %.1f of %.1f GB are read, %.2f GB/s, about %.0f s to go",
            *(bytes_read / 1e9, self._total_bytes / 1e9, bytes_read / seconds / 1e9),
            left * seconds / max(1, bytes_read),
        )
