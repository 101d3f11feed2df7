"""The thread that commits captured snapshots while training goes on."""

from __future__ import annotations

import queue
import threading

from cpr_ext.snapshot import Snapshot


class Committer:
    """Commits snapshots one after the other, in the order in which they are handed over."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cpr_ext-committer", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Hand a captured snapshot over."""
        self._queue.put(snapshot)

    def close(self) -> None:
        """Commit what was handed over, then end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            snapshot.commit()  # keeps its error for whoever waits
