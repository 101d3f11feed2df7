"""Ctrl-C at a chosen line of the library, in a call of the training loop."""

import gc
import sys
from pathlib import Path

import cpr_ext

_ROOT = f"{Path(cpr_ext.__file__).parent}/"


class InterruptedCall:
    """Raises KeyboardInterrupt before the ``at``-th line that the library runs in a call.

    Attributes:
        num_lines: lines that were run, of this file's folders only.
        where: file and line at which it was raised; None: it was not.
    """

    def __init__(self, at=0):
        self.at = at
        self.num_lines = 0
        self.where = None

    def __call__(self, call, *arguments):
        gc.disable()  # what ends garbage of others is not interrupted
        sys.settrace(self._enter)
        try:
            return call(*arguments)
        finally:
            sys.settrace(None)
            gc.enable()

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename.startswith(_ROOT) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                sys.settrace(None)
                name = frame.f_code.co_filename.removeprefix(_ROOT)
                self.where = f"{name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line
