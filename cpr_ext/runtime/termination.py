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
from collections.abc import Callable
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
            if callable(handler) and not isinstance(handler, _Children):
                signal.signal(signal.SIGCHLD, _Children(handler))
        return self.is_wanted

    def has_ended_loader(
        self, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Return whether an error is that of a data loader whose workers the signal has ended."""
        is_error = isinstance(error, Exception)  # Ctrl-C is none
        if not self._is_listening or not is_error or not _is_of_a_loader(traceback):
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
        handler = signal.getsignal(signal.SIGCHLD)
        if isinstance(handler, _Children) and not _who_hears():
            signal.signal(signal.SIGCHLD, handler.before)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note the wish: a signal handler."""
        self.is_wanted = True

    @property
    def hears_of_children(self) -> bool:
        """Whether errors of ended workers are a wish; after one they die until the process ends."""
        return self._is_listening or self.is_wanted


class _Children:
    """Hears of ended children in place of who did before, whom it calls.

    Attributes:
        before: that handler. It may call another of these.
    """

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.before(number, frame)
        except RuntimeError as error:
            who = _who_hears()
            is_told = str(signal.strsignal(signal.SIGTERM)) in str(error)
            if not who or not (is_told or any(each.is_wanted for each in who)):
                raise
            for each in who:
                each.is_wanted = True


_listening: weakref.WeakSet[Termination] = weakref.WeakSet()


def _who_hears() -> list[Termination]:
    return [each for each in list(_listening) if each.hears_of_children]


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
