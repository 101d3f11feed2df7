"""The handle of a snapshot that users get: what it holds, and whether it is durable."""

from __future__ import annotations

from typing import Literal

from cpr_ext.errors import UsageError
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot import Snapshot

SnapshotState = Literal["requested", "capturing", "captured", "committed", "failed"]


class SnapshotHandle:
    """A snapshot on its way to the store; ``Checkpointer.save()`` and ``step()`` return it.

    After an optimizer's step and before ``step()``, the model is past the step that the
    Checkpointer knows. So a snapshot taken there could not name its step. A handle from there
    stands for a snapshot that the next ``step()`` takes.
    """

    def __init__(self, kind: SnapshotKind, snapshot: Snapshot | None = None) -> None:
        self._kind: SnapshotKind = kind
        self._snapshot = snapshot
        self._refusal: Exception | None = None

    @property
    def kind(self) -> SnapshotKind:
        """``base`` (all rows) or ``partial`` (selected rows)."""
        return self._kind if self._snapshot is None else self._snapshot.kind

    @property
    def state(self) -> SnapshotState:
        """``requested``, ``capturing``, ``captured``; in the end ``committed`` or ``failed``."""
        if self._snapshot is not None:
            return self._snapshot.state
        return "requested" if self._refusal is None else "failed"

    @property
    def number(self) -> int | None:
        """Its number in the store; newer ones are higher. None: it is not taken yet."""
        return None if self._snapshot is None else self._snapshot.number

    @property
    def step(self) -> int | None:
        """The training step from which a recovery resumes. None: it is not captured yet."""
        snapshot = self._snapshot
        return None if snapshot is None or snapshot.last_step < 0 else snapshot.last_step

    @property
    def is_complete(self) -> bool:
        """Whether it is committed and makes a full-recovery point; once True, it stays so.

        Rows that it does not hold are first compared with what was saved, while training
        continues. ``Checkpointer.wait()``, ``check()`` and ``close()`` compare them at once.
        """
        snapshot = self._snapshot
        return snapshot is not None and snapshot.is_complete and snapshot.state == "committed"

    @property
    def file_bytes(self) -> int:
        """Bytes of its committed segments."""
        return 0 if self._snapshot is None else self._snapshot.file_bytes

    @property
    def is_done(self) -> bool:
        """Whether it is committed or failed."""
        return self._refusal is not None or (self._snapshot is not None and self._snapshot.is_done)

    @property
    def error(self) -> Exception | None:
        """Why it failed; None: it did not."""
        return self._refusal if self._snapshot is None else self._snapshot.error

    def wait_until_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it is committed or failed; return False if the time ran out first.

        Only a captured snapshot gets there without further steps, see ``Checkpointer.wait()``.

        Raises:
            UsageError: ``step()`` has not taken it yet, and cannot while this waits.
        """
        if self._snapshot is not None:
            return self._snapshot.wait_until_done(timeout_seconds)
        if self._refusal is None:
            raise UsageError(
                "save() was called in the middle of a step, so step() takes the snapshot when the "
                "step is done; wait for it after that"
            )
        return True

    def upgrade(self) -> None:
        """Make a requested snapshot one of all rows; for the Checkpointer."""
        self._kind = "base"

    def resolve(self, snapshot: Snapshot) -> None:
        """Stand for this snapshot from now on; for the Checkpointer."""
        self._snapshot = snapshot

    def refuse(self, error: Exception) -> None:
        """Record why no step will take a requested snapshot; for the Checkpointer."""
        self._refusal = error

    def __repr__(self) -> str:
        return (
            f"SnapshotHandle(kind={self.kind!r}, state={self.state!r}, number={self.number}, "
            f"step={self.step}, is_complete={self.is_complete}, file_bytes={self.file_bytes}, "
            f"error={self.error!r})"
        )
