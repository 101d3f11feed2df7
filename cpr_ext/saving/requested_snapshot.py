"""A snapshot that was asked for while a step was being made: the end of the step takes it."""

from __future__ import annotations

from typing import Any

from cpr_ext.errors import UsageError
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import Snapshot


class RequestedSnapshot:
    """Stands for a snapshot until ``step()`` takes it, and for that one from then on.

    Between an optimizer's step and ``Checkpointer.step()`` the model is past the step that the
    Checkpointer knows, so nothing that is saved there could name its step.

    Attributes:
        kind: ``base`` or ``partial``, as asked for.
        snapshot: the one that was taken; None: not yet.
    """

    def __init__(self, kind: SnapshotKind) -> None:
        self.kind: SnapshotKind = kind
        self.snapshot: Snapshot | None = None
        self._refusal: Exception | None = None

    def give_up(self, error: Exception) -> None:
        """It will not be taken, because of ``error``."""
        self._refusal = error

    @property
    def state(self) -> str:
        """``requested``, or that of the snapshot."""
        if self.snapshot is not None:
            return self.snapshot.state
        return "requested" if self._refusal is None else "failed"

    @property
    def is_done(self) -> bool:
        """Committed or failed."""
        return self._refusal is not None or (self.snapshot is not None and self.snapshot.is_done)

    @property
    def error(self) -> Exception | None:
        """Why it failed."""
        return self.snapshot.error if self.snapshot is not None else self._refusal

    def wait_until_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it is committed or failed; False if the time ran out.

        Raises:
            UsageError: ``step()`` has not taken it yet, and cannot while this waits.
        """
        if self.snapshot is not None:
            return self.snapshot.wait_until_done(timeout_seconds)
        if self._refusal is None:
            raise UsageError(
                "save() was called in the middle of a step, so step() takes the snapshot when the "
                "step is done; wait for it after that"
            )
        return True

    def __getattr__(self, name: str) -> Any:
        snapshot = self.__dict__.get("snapshot")
        if snapshot is None:
            raise AttributeError(f"{name}: step() has not taken this snapshot yet")
        return getattr(snapshot, name)
