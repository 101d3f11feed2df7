"""Hides warnings of torch and TorchRec about themselves, which users cannot act on.

Each worker of a job repeats them, so that they bury the one line that says what happened.
"""

from __future__ import annotations

import logging
import sys
import warnings

# category, beginning of the message
_WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # torch.optim.Adagrad makes a sparse tensor, whatever its caller does.
    (UserWarning, "Sparse invariant checks are implicitly disabled"),
    # TorchRec 1.8 under torch 2.13.
    (FutureWarning, "`broadcast_buffers` is deprecated"),
    (FutureWarning, r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is dep"),
)
# logger, beginning of the message
_LOGS = (("torch.fx._symbolic_trace", "is_fx_tracing will return true"),)


class _Without(logging.Filter):
    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._beginning)


def hide_foreign_warnings() -> None:
    """Hide them in this process, unless it was started with warnings of its own choice (-W)."""
    if sys.warnoptions:
        return
    for category, beginning in _WARNINGS:
        warnings.filterwarnings("ignore", beginning, category)
    for name, beginning in _LOGS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, _Without) for found in logger.filters):
            logger.addFilter(_Without(beginning))
