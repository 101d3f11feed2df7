"""Descriptors that belong to this process alone: a forked child closes its copies.

A lock of ``flock`` lasts until the last copy of its descriptor is closed. The data-loader workers
of a killed process would keep it for seconds, and connections as well.
"""

from __future__ import annotations

import contextlib
import os

# With what each one is, so that no other file of the same number is closed.
_descriptors: dict[int, tuple[int, int]] = {}


def keep_from_children(descriptor: int) -> int:
    """Have every child that is forked from now on close its copy; returns the descriptor."""
    _descriptors[descriptor] = _identify(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed here."""
    _descriptors.pop(descriptor, None)


def _identify(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _close_copies() -> None:
    for descriptor, known in _descriptors.items():
        with contextlib.suppress(OSError):
            if _identify(descriptor) == known:
                os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_copies)
