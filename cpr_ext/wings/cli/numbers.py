"""Types of options that are numbers."""

from __future__ import annotations

from typing import Any

import click

_MOST = 1e12  # of megabytes, hours or rows: far more is a slip, and no float of bytes

#: That one command starts on a machine; more are a slip of the finger.
MOST_PROCESSES = 1024


class Amount(click.FloatRange):
    """A number within bounds: neither NaN nor infinite, whatever the bounds.

    Args:
        least, most: both are allowed.
        above: instead of ``least``: this itself is not allowed.
    """

    def __init__(
        self, least: float = 0.0, most: float = _MOST, *, above: float | None = None
    ) -> None:
        least, is_open = (least, False) if above is None else (above, True)
        super().__init__(min=least, max=most, min_open=is_open)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; NaN compares false with every bound."""
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"'{value}' is not a number.", param, ctx)
        return number
