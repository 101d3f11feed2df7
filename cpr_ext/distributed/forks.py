"""Descriptors that belong to this process alone: a forked child closes its copies.

A lock that was taken with ``flock`` lasts until the last copy of its descriptor is closed, so the
data-loader workers of a killed process would keep it for seconds; and so would a connection.
"""

from __future__ import annotations

import os

_descriptors: set[int] = set()


def keep_from_children(descriptor: int) -> int:
    """Have every child that is forked from now on close its copy; returns the descriptor."""
    _descriptors.add(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed here."""
    _descriptors.discard(descriptor)


def _close_copies() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_copies)
