"""What the engine asks of a copy of a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from cpr_ext.storage.manifest import Manifest, SegmentRecord


@dataclass(frozen=True)
class RemoteStatus:
    """How far a copy is.

    Attributes:
        step: of the newest state that is there; -1: none is.
        lag_seconds: how long the oldest committed state that is not there has waited; 0: all is.
        lag_bytes: what is to be sent of the newest committed state.
        bytes_sent: so far, also in vain.
        failures: requests that failed since the last state was added.
        error: the last of them; empty: none.
        is_fenced: another process writes there now, so copying has ended.
    """

    step: int
    lag_seconds: float
    lag_bytes: int
    bytes_sent: int
    failures: int
    error: str
    is_fenced: bool


class Origin(Protocol):
    """A copy that follows a store, and from which files of the store can be read.

    Attributes:
        read_from: the address from which the store was read when it was opened; empty: it existed.
    """

    read_from: str

    @property
    def pinned(self) -> frozenset[str]:
        """The commits that stay among the ancestors of later ones: what the copy is of."""

    def begin(self, manifest: Manifest) -> None:
        """Begin with a store that is open, whose committed state this is; raises if it must not."""

    def on_commit(self, state: Manifest) -> None:
        """Take note of a newly committed state; returns at once, on any thread."""

    def fetch(self, record: SegmentRecord, path: Path) -> bool:
        """Replace a file of the store by its copy; False if there is none.

        Raises:
            CprError, OSError: it could not be read, or is not as written.
        """

    def status(self) -> RemoteStatus:
        """Return how far the copy is."""

    def end(self, *, waits: bool) -> None:
        """End; wait before, for a bounded time, for the newest state to be there."""

    def let_go(self) -> None:
        """End once nothing is to be done; a finalizer calls it, whatever locks its thread holds."""


@runtime_checkable
class Remote(Protocol):
    """Where the copy of a store is: what users give, such as ``RemoteOptions``."""

    def open(self, directory: Path) -> Origin:
        """Return the copy of the store in a directory, into which it is read if that is empty."""
