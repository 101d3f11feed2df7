"""The errors of this library, in three kinds.

A bug is an ``AssertionError``. A fault of the user or the system is one of the exceptions below,
with the values and the remedy. Damage that recovery expects is reported, not raised.

Below them are the warnings of names that are old: these work for one version.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


class CprError(Exception):
    """Base of every error this library raises on purpose."""


class UsageError(CprError, ValueError):
    """The caller requested something impossible; nothing was changed."""


class RowIndexError(UsageError, IndexError):
    """A row index is negative or not below the table's ``num_embeddings``; nothing was changed."""


class NanError(CprError, ArithmeticError):
    """A row to save holds NaN; it did not replace its last good state."""


class DataError(CprError):
    """Training data is missing, unreadable or malformed beyond use."""


class StoreError(CprError):
    """A directory is not a store, belongs to another model, or has an unknown version."""


class DamageError(StoreError):
    """A committed file is missing or fails its checksum; an unreadable file is not damaged."""


class StorageError(CprError, OSError):
    """The operating system refused a file operation (disk full, I/O error, permission).

    ``errno`` and ``filename`` are set as in every ``OSError``.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CudaError(CprError, RuntimeError):
    """A call of the CUDA runtime failed: its name, CUDA's own message, file and line."""


class NotProvenError(CprError):
    """A loop that was killed and recovered trained otherwise than one that was not."""


class SnapshotError(CprError):
    """A snapshot could not be committed; its cause is ``__cause__``, earlier ones are intact."""


class SnapshotFailedWarning(UserWarning):
    """Training continues after an aborted snapshot; ``wait()`` and ``close()`` raise the error."""


class UntrackedChangeWarning(UserWarning):
    """A table changed in an untracked way; the warning states the cost and the remedy."""


class PeerLostError(CprError):
    """A peer died, hung or cannot be reached; the workers meet again and resume."""


class RendezvousError(CprError):
    """The workers of a job could not meet within their time limit."""


class WorkersDifferError(CprError):
    """Workers of a job hold different values of state that they must share; no step follows."""


def warn_of_old_name(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that cpr_ext.``old`` will be removed, and name its replacement.

    Args:
        stacklevel: the frame that the warning names: 2 is the caller of this, 3 the one before.
    """
    text = f"cpr_ext.{old} will be removed; use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def old_method(old: str, new: str) -> Callable[..., Any]:
    """Make a method that warns of its old name and calls the one with the new name."""

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        warn_of_old_name(f"{type(self).__name__}.{old}()", f"{new}()")
        return getattr(self, new)(*args, **kwargs)

    call.__name__ = old
    call.__doc__ = f"Call :meth:`{new}`; an old name that will be removed."
    return call


class RenamedTo:
    """An attribute that has another name now: ``old = RenamedTo("new")`` in a class body."""

    def __init__(self, new_name: str) -> None:
        self._new_name = new_name
        self.__doc__ = f"Deprecated; use ``{new_name}``."

    def __set_name__(self, owner: type, name: str) -> None:
        self._old_name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_of_old_name(self._old_name, self._new_name)
        return getattr(instance, self._new_name)
