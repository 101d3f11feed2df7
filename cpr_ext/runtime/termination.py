"""A wish to end, by SIGTERM or a call, that training grants at the end of a step.

Spot machines, Kubernetes and Slurm send SIGTERM some seconds before they end a process. Many send
it to all processes of a job, so that workers of a data loader die first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from types import FrameType, TracebackType
from typing import Any, Literal

from cpr_ext.errors import UsageError

OnSigterm = Literal["save"]
# As a shell shows a process that SIGTERM ended. torchrun, Kubernetes, Slurm with --requeue and
# `cpr launch` start a process again that ends in this way.
EXIT_CODE = 128 + signal.SIGTERM
# So much later than a worker of a loader has gone may be heard that it has.
_LATE_SECONDS = 1.0


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
        self._of_children: Any = None  # who heard of ended children before
        self._is_listening = False

    def listen(self) -> None:
        """Take SIGTERM for such a wish, until :meth:`close`."""
        if not self._is_asked:
            return
        self._previous = signal.signal(signal.SIGTERM, self.note)
        self._is_listening = True
        _listening.add(self)

    def is_due(self) -> bool:
        """Return whether training is to end with this step; asked at the end of each.

        torch raises an error wherever the main thread is when a worker of a data loader dies. From
        the first step on it does not for one that SIGTERM ended: that is such a wish, too.
        """
        if self._is_listening and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler) and handler != self._note_child:
                self._of_children = handler
                signal.signal(signal.SIGCHLD, self._note_child)
        return self.is_wanted

    def has_ended_loader(self, traceback: TracebackType | None) -> bool:
        """Return whether an error is that of a data loader whose workers the signal has ended."""
        if not self._is_listening or not _is_of_a_loader(traceback):
            return False
        deadline = time.monotonic() + _LATE_SECONDS
        while not self.is_wanted and time.monotonic() < deadline:
            time.sleep(0.01)  # a broken connection may be seen before the signal
        return self.is_wanted

    def close(self) -> None:
        """Leave the signals to who had them before, unless somebody else has them by now."""
        if not self._is_listening or threading.current_thread() is not threading.main_thread():
            return
        self._is_listening = False
        if signal.getsignal(signal.SIGTERM) == self.note:
            signal.signal(signal.SIGTERM, self._previous)
        # After a wish workers may die until the process has ended.
        if signal.getsignal(signal.SIGCHLD) == self._note_child and not self.is_wanted:
            signal.signal(signal.SIGCHLD, self._of_children)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the wish: a signal handler."""
        self.is_wanted = True

    def _note_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._of_children(number, frame)
        except RuntimeError as error:
            if not self.is_wanted and str(signal.strsignal(signal.SIGTERM)) not in str(error):
                raise
            self.is_wanted = True


_listening: weakref.WeakSet[Termination] = weakref.WeakSet()


def _close_in_child() -> None:
    """Give a forked child, such as a data-loader worker, the handlers that were there before."""
    for termination in list(_listening):
        termination.close()


def _is_of_a_loader(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).startswith("torch.utils.data."):
            return True
        traceback = traceback.tb_next
    return False


os.register_at_fork(after_in_child=_close_in_child)
