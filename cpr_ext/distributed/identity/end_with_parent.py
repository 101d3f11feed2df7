"""Processes that end with the one that started them, also if that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
# Looked up here: what runs between fork and exec must not load anything.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; for ``preexec_fn``.

    Args:
        parent: the process that is meant; it may be gone already.
    """
    if _prctl is None:  # systems without it
        return
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
