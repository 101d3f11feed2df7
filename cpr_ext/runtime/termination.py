"""A wish to end, by SIGTERM or a call, that training grants at the end of a step.

Spot machines, Kubernetes and Slurm send SIGTERM some seconds before they end a process.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any, Literal

from cpr_ext.errors import UsageError

OnSigterm = Literal["save"]
# As a shell shows a process that SIGTERM ended. torchrun, Kubernetes, Slurm with --requeue and
# `cpr launch` start a process again that ends in this way.
EXIT_CODE = 128 + signal.SIGTERM


class Termination:
    """Of one training loop.

    Args:
        on_sigterm: ``"save"``: :meth:`listen` takes SIGTERM for such a wish; None: it does nothing.

    Attributes:
        is_wanted: training is to end at the end of the step.

    Raises:
        UsageError: another value, or this is not the main thread, which alone hears of signals.
    """

    def __init__(self, on_sigterm: OnSigterm | None = None) -> None:
        if on_sigterm not in (None, "save"):
            raise UsageError(f'on_sigterm is {on_sigterm!r}; allowed: "save", None')
        is_main = threading.current_thread() is threading.main_thread()
        if on_sigterm is not None and not is_main:
            raise UsageError(
                'on_sigterm="save" needs the main thread, which alone hears of signals: make this '
                "object there, or leave on_sigterm= out"
            )
        self._is_asked = on_sigterm is not None
        self.is_wanted = False
        self._previous: Any = None
        self._is_listening = False

    def listen(self) -> None:
        """Take SIGTERM for such a wish, until :meth:`close`."""
        if not self._is_asked:
            return
        self._previous = signal.signal(signal.SIGTERM, self.note)
        self._is_listening = True
        _listening.add(self)

    def close(self) -> None:
        """Leave SIGTERM to who had it before, unless somebody else has it by now."""
        if not self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = False
        if signal.getsignal(signal.SIGTERM) == self.note:
            signal.signal(signal.SIGTERM, self._previous)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the wish: a signal handler."""
        self.is_wanted = True


_listening: weakref.WeakSet[Termination] = weakref.WeakSet()


def _close_in_child() -> None:
    """Give a forked child, such as a data-loader worker, the handler that was there before."""
    for termination in list(_listening):
        termination.close()


os.register_at_fork(after_in_child=_close_in_child)
