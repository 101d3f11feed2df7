"""The errors of this library, in three kinds.

A bug is an ``AssertionError``. A fault of the user or the system is one of the exceptions below,
with the values and the remedy. Damage that recovery expects is reported, not raised.
"""

from __future__ import annotations


class CprError(Exception):
    """Base of every error this library raises on purpose."""


class UsageError(CprError):
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


class RemoteError(CprError):
    """An object store refused a request, or holds what this job cannot use."""


class CudaError(CprError, RuntimeError):
    """A call of the CUDA runtime failed: its name, CUDA's own message, file and line."""


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
