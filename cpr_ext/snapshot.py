"""One snapshot of all shards of this process and of the dense part.

The training thread drives :meth:`Snapshot.advance` between steps; when all is captured, a committer
thread runs :meth:`Snapshot.commit`. Only one of the two works on a snapshot at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cpr_ext.dense import DensePart
from cpr_ext.errors import SnapshotError
from cpr_ext.segment import Chunk
from cpr_ext.segment_capture import (
    SegmentCapture,
    WriteOptions,
    dense_sources,
    selection_source,
)
from cpr_ext.selection import Selection, Selector
from cpr_ext.store import Store

State = Literal["capturing", "captured", "committed", "failed"]
SnapshotKind = Literal["base", "partial"]


@dataclass
class _Part:
    """The segment of one shard."""

    shard: int
    capture: SegmentCapture
    selections: Sequence[Selection]
    # (tracker, what it gave for captured rows), put back if the segment is not committed.
    taken: list[tuple[Any, Any]] = field(default_factory=list)
    is_committed: bool = False


class Snapshot:
    """A snapshot in flight, or done; what ``Checkpointer.save`` returns.

    Attributes:
        number: counts the snapshots of the store; newer ones are higher.
        kind: ``base`` (all rows) or ``partial`` (selected rows).
        state: ``capturing`` -> ``captured`` -> ``committed``, or ``failed``.
        first_step, last_step: the steps at which rows were captured.
        num_samples: samples trained at ``last_step``.
        file_bytes: bytes of all its segments.
        is_complete: it makes a full-recovery point.
        error: why it failed.
    """

    def __init__(
        self,
        *,
        number: int,
        kind: SnapshotKind,
        store: Store,
        selector: Selector,
        pipeline: Any,
        options: WriteOptions,
        capture_dense: Callable[[], DensePart],
    ) -> None:
        self.number = number
        self.kind: SnapshotKind = kind
        self._state: State = "capturing"
        self.first_step = -1
        self.last_step = -1
        self.num_samples = 0
        self.file_bytes = 0
        self.is_complete = False
        self.error: Exception | None = None
        self._store = store
        self._selector = selector
        self._pipeline = pipeline
        self._options = options
        self._capture_dense = capture_dense
        self._dense: DensePart | None = None
        self._done = threading.Event()
        self._parts: list[_Part] = []
        self._chosen: list[Selection] = []
        try:
            for shard in range(store.num_shards):
                self._choose(shard)
        except Exception as error:
            self._fail(error)

    def _choose(self, shard: int) -> None:
        is_base = self.kind == "base"
        chosen = self._selector.base(shard) if is_base else self._selector.partial(shard)
        self._chosen += chosen
        selections = [selection for selection in chosen if selection.num_rows > 0]
        if selections:
            self._parts.append(_Part(shard, self._start(shard, selections), selections))

    def _start(self, shard: int, selections: Sequence[Selection]) -> SegmentCapture:
        return SegmentCapture(
            self._pipeline,
            self._store.shards[shard],
            snapshot=self.number,
            kind=self.kind,
            sources=[selection_source(selection) for selection in selections],
            metadata={"shard": shard},
            options=self._options,
        )

    def advance(
        self, step: int, num_samples: int, *, max_bytes: int = 0, wait_for_slot: bool
    ) -> None:
        """Capture rows as they are at ``step``, on the training thread, until the budget is spent.

        Args:
            max_bytes: about how much to capture in this call; 0: no limit.
            wait_for_slot: wait for the disk instead of coming back at the next step.
        """
        if self._state != "capturing":
            return
        try:
            captured_bytes = 0
            for part in self._parts:
                if not part.capture.is_capturing:
                    continue
                if 0 < max_bytes <= captured_bytes:
                    return
                left = max_bytes - captured_bytes if max_bytes else 0
                chunks = part.capture.capture(step, max_bytes=left, wait_for_slot=wait_for_slot)
                captured_bytes += self._take(part, chunks, step)
                if part.capture.is_capturing:
                    return
            self._finish_capture(step, num_samples)
        except Exception as error:
            self._fail(error)

    def _take(self, part: _Part, chunks: Sequence[Chunk], step: int) -> int:
        """Note captured rows as saved; returns their bytes."""
        if chunks and self.first_step < 0:
            self.first_step = step
        for table, first, count, *_ in chunks:
            selection = part.selections[table]
            part.taken.append((selection.tracker, selection.take(first, count)))
        return sum(part.capture.chunk_bytes(chunk[0], chunk[2]) for chunk in chunks)

    def _finish_capture(self, step: int, num_samples: int) -> None:
        self.first_step = step if self.first_step < 0 else self.first_step
        self.last_step = step
        self.num_samples = num_samples
        self.is_complete = self.first_step == step and all(
            self._selector.is_complete(selection) for selection in self._chosen
        )
        self._dense = self._capture_dense()
        self._state = "captured"

    def commit(self) -> None:
        """Finish every segment and commit it; the dense part last. On the committer's thread."""
        try:
            for part in self._parts:
                record = part.capture.finish(num_samples=self.num_samples)
                self._store.add_to_shard(part.shard, record)
                part.capture.mark_committed()
                part.is_committed = True
                self.file_bytes += record.file_bytes
            self._commit_dense()
            self._store.retain()
        except Exception as error:
            self._fail(error)
        else:
            self._state = "committed"
            self._done.set()

    def _commit_dense(self) -> None:
        assert self._dense is not None, "commit() before everything is captured"
        # The dense part is a copy already, so filling the slots needs no training thread.
        capture = SegmentCapture(
            self._pipeline,
            self._store.dense,
            snapshot=self.number,
            kind="dense",
            sources=dense_sources(self._dense),
            metadata={"skeleton": self._dense.skeleton},
            options=WriteOptions(self._options.direct_io, refuse_nan=False),
        )
        while capture.is_capturing:
            capture.capture(self.last_step, max_bytes=0, wait_for_slot=True)
        record = capture.finish(num_samples=self.num_samples, is_complete=self.is_complete)
        self._store.add_dense(record)
        capture.mark_committed()
        self.file_bytes += record.file_bytes
        self._dense = None

    def cancel(self, reason: str) -> None:
        """Give up a snapshot that is still capturing; from the training thread."""
        if self._state == "capturing":
            self._fail(SnapshotError(f"snapshot {self.number} was given up: {reason}"))

    def _fail(self, error: Exception) -> None:
        for part in self._parts:
            if not part.is_committed:
                part.capture.cancel(str(error))
        self.error = error
        self._state = "failed"
        self._done.set()

    def put_back(self) -> None:
        """Give the rows of a failed save their priority back; from the training thread."""
        for part in self._parts:
            if not part.is_committed:
                for tracker, taken in part.taken:
                    tracker.put_back(taken)
            part.taken.clear()

    @property
    def state(self) -> State:
        """Where it is; it changes while other threads work on it."""
        return self._state

    @property
    def is_captured(self) -> bool:
        """All of it is captured and nothing has failed: it may be committed."""
        return self._state == "captured"

    @property
    def is_done(self) -> bool:
        """Committed or failed."""
        return self._done.is_set()

    def wait_until_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the snapshot is committed or failed; False if the time ran out.

        Only a captured snapshot gets there without further training steps.
        """
        return self._done.wait(timeout_seconds)
