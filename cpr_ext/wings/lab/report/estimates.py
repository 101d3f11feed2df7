"""Estimates as text: the mean, and its interval in brackets."""

from __future__ import annotations

import math

from cpr_ext.wings.lab.emulation.statistics import Estimate


def percent(estimate: Estimate | None, digits: int = 2) -> str:
    """Return a share, in percent."""
    return _format(estimate, 100, digits)


def difference(estimate: Estimate | None, digits: int = 2) -> str:
    """Return a small difference, in thousandths."""
    return _format(estimate, 1000, digits)


def ratio(estimate: Estimate | None, digits: int) -> str:
    """Return a number as it is."""
    return _format(estimate, 1, digits)


def _format(estimate: Estimate | None, factor: float, digits: int) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    text = f"{factor * estimate.mean:.{digits}f}"
    if math.isnan(estimate.low):
        return text
    return f"{text} [{factor * estimate.low:.{digits}f}, {factor * estimate.high:.{digits}f}]"
