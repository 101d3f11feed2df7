"""What can go wrong, in three kinds.

A bug is an ``AssertionError``. The user's or the system's fault is one of the exceptions below and
carries the values and the remedy. Damage that recovery expects is reported, not raised.
"""


class CprError(Exception):
    """Base of every error this library raises on purpose."""


class UsageError(CprError, ValueError):
    """The caller asked for something that cannot be; nothing was changed."""


class RowIndexError(UsageError, IndexError):
    """A row index is negative or not below the table's ``num_embeddings``; nothing was changed."""


class NanError(CprError, ArithmeticError):
    """A row that was to be saved holds NaN; it did not replace its last good state."""


class DataError(CprError):
    """Training data is missing, unreadable or malformed beyond use."""


class StoreError(CprError):
    """A directory is not a store, belongs to another model, or holds a version not known here."""


class DamageError(StoreError):
    """A committed file is missing or fails its checksum; one that cannot be read is no damage."""


class StorageError(CprError, OSError):
    """The operating system refused a file operation (disk full, I/O error, permission).

    ``errno`` and ``filename`` are set as in every ``OSError``.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CudaError(CprError, RuntimeError):
    """A call of the CUDA runtime failed: its name, CUDA's own message, file and line."""


class SnapshotError(CprError):
    """A snapshot could not be committed; its cause is ``__cause__``, earlier ones are intact."""


class SnapshotFailedWarning(UserWarning):
    """Training goes on, but a snapshot was given up; ``wait()`` and ``close()`` raise the error."""


class UntrackedChangeWarning(UserWarning):
    """A table changed in a way that is not watched: what that costs, and what to do."""


class PeerLostError(CprError):
    """A peer died, hung or cannot be reached; the workers meet again and go on."""


class RendezvousError(CprError):
    """The workers of a job could not meet within the time they were given."""


class WorkersDifferError(CprError):
    """Workers of a job hold different values of what must be the same; nothing was trained on."""
