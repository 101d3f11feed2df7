"""What notebooks show of an object: a table of names and values."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


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
