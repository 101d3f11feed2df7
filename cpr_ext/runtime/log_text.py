"""Text for logs and notebooks, and warnings of other libraries that are none for users."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping
from html import escape
from typing import Literal


def encodable(text: object) -> str:
    """Return ``str(text)`` with what UTF-8 cannot encode written as escapes."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class EncodableMessages(logging.Filter):
    """Makes every message of a logger one that any handler can write."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, with its final text."""
        record.msg, record.args = encodable(record.getMessage()), None
        return True


Part = Literal["jobs", "parity", "publishing", "recovery", "remote", "saving", "schedules"]


def logger_of(part: Part) -> logging.Logger:
    """Return the logger ``cpr_ext.PART``, whose messages any handler can write."""
    logger = logging.getLogger(f"cpr_ext.{part}")
    if not logger.filters:
        logger.addFilter(EncodableMessages())
    return logger


def html_table(caption: str, values: Mapping[str, object]) -> str:
    """Return an HTML table with a caption and a row for each value.

    Args:
        values: None is shown as "not known"; of a dictionary or list is shown how many it holds.
    """
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(_text(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{''.join(rows)}</table>"


def _text(value: object) -> str:
    if value is None:
        return "not known"
    if isinstance(value, dict | list):
        return str(len(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
