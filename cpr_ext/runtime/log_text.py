"""Text for logs and warnings: paths may hold bytes that are no UTF-8, which streams refuse."""

from __future__ import annotations

import logging
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
