"""Descriptors: how many a process may have, and those that are its own: a child closes its copies.

A lock of ``flock`` lasts until the last copy of its descriptor is closed. The data-loader workers
of a killed process would keep it for seconds, and connections as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource

_MANY = 1 << 20
# With what each one is, so that no other file of the same number is closed.
_descriptors: dict[int, tuple[int, int]] = {}


def keep_from_children(descriptor: int) -> int:
    """Have every child that is forked from now on close its copy; returns the descriptor."""
    _descriptors[descriptor] = _identify(descriptor)
    return descriptor


def release(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed here."""
    _descriptors.pop(descriptor, None)


def allow_more(number: int | None = None) -> int:
    """Raise the limit of open files of this process, as far as the system lets it.

    Args:
        number: how many more than now; None: as many as the system allows.

    Returns:
        How many this process may have open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MANY
    wanted = _MANY if number is None else soft + number
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


def describe(error: OSError) -> str:
    """Return what a person reads of an error; the limit and the remedy if files ran out."""
    if error.errno != errno.EMFILE:
        return str(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        f"{error}: this process may have {limit} files open, connections included; raise its hard "
        "limit (`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
    )


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
