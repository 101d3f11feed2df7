"""What a forked child inherits: copies of objects whose threads and locks stay with its parent.

A child made by ``os.fork()``, such as a data loader's worker, has none of its parent's threads. A
call that waits for such a thread would never return. In the child these objects do nothing and say
so.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol

from cpr_ext.errors import UsageError


class _Inherited(Protocol):
    def leave_to_parent(self) -> None: ...


class Creator:
    """The process that made an object."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def is_this_process(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self.pid

    def require(self, what: str) -> None:
        """Raise UsageError in a forked child, naming both processes."""
        if not self.is_this_process:
            raise UsageError(
                f"this {what} belongs to process {self.pid}; this is process {os.getpid()}, which "
                "was forked off and has neither its threads nor its locks. Use it in process "
                f"{self.pid} only"
            )


_inherited: weakref.WeakSet[_Inherited] = weakref.WeakSet()


def leave_to_parent_when_forked(owner: _Inherited) -> None:
    """Call ``owner.leave_to_parent()`` in every child that is forked off, as its first action."""
    _inherited.add(owner)


def _leave_all() -> None:
    for owner in list(_inherited):
        with suppress(Exception):
            owner.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
