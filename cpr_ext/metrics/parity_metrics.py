"""What parity protects now, and what it costs."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class ParityMetrics:
    """What peers hold of a worker's rows, and what sending it costs.

    Attributes:
        protected: any one worker of the parity group could be rebuilt now.
        machines_at_risk: which have several workers of the group, so that it does not survive their
            loss. 0 in a job of loopback addresses.
        completed_step: the newest.
        acknowledged_step: the newest of which the peers have the changes.
        bytes_sent: by this worker, in this round of all workers.
        rebuilt_bytes, bytes_to_rebuild: of this group's rows and parity, decoded or encoded by the
            newest rebuild, and in all.
        rebuilds: rebuilds of the group's rows or parity that were completed.
    """

    protected: bool = False
    machines_at_risk: int = 0
    completed_step: int = 0
    acknowledged_step: int = 0
    bytes_sent: int = 0
    rebuilt_bytes: int = 0
    bytes_to_rebuild: int = 0
    rebuilds: int = 0
    _sending_since: float = 0.0

    @property
    def lag_steps(self) -> int:
        """Completed steps of which the peers do not have the changes yet; 0 while unprotected."""
        return self.completed_step - self.acknowledged_step if self.protected else 0

    @property
    def bytes_per_second(self) -> float:
        """Bytes sent per second, in this round of all workers; 0 while unprotected."""
        if not self.protected:
            return 0.0
        return self.bytes_sent / max(time.perf_counter() - self._sending_since, 1e-9)

    @property
    def rebuild_progress(self) -> float:
        """The share of the newest rebuild that is done, from 0 to 1."""
        return self.rebuilt_bytes / self.bytes_to_rebuild if self.bytes_to_rebuild else 1.0

    def begin_sending(self, step: int) -> None:
        """Count what is sent from now on: the changes after ``step``."""
        self._sending_since, self.bytes_sent = time.perf_counter(), 0
        self.completed_step = self.acknowledged_step = step

    def note_protected(self) -> None:
        """Note that all parity of the group is encoded, and changes are sent."""
        self.protected = True

    def note_unprotected(self) -> None:
        """Note that the group lacks a member, or some of its parity."""
        self.protected = False

    def note_acknowledged(self, step: int, num_bytes: int) -> None:
        """Note that the peers have the changes of ``step``, sent in so many bytes."""
        self.acknowledged_step = step
        self.bytes_sent += num_bytes

    def begin_rebuild(self, num_bytes: int) -> None:
        """Begin to decode or encode so many bytes of rows and parity."""
        self.rebuilt_bytes, self.bytes_to_rebuild = 0, num_bytes

    def note_rebuilt(self, num_bytes: int) -> None:
        """Add bytes that are done."""
        self.rebuilt_bytes += num_bytes

    def end_rebuild(self) -> None:
        """Note that all of them are done."""
        self.rebuilt_bytes = self.bytes_to_rebuild
        self.rebuilds += 1
