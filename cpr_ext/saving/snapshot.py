"""One snapshot: rows of all tables, and the dense part.

The training thread drives :meth:`Snapshot.capture_rows` between steps, or a capturing thread does
while training reads the tables. When all is captured, a commit thread runs
:meth:`Snapshot.commit`. Only one of them works on a snapshot at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.forks import Creator
from cpr_ext.saving.segment_capture import SegmentCapture, WriteOptions, dense_sources
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot_rows import SnapshotContext, SnapshotRows
from cpr_ext.state.dense_state import DensePart, content_digest
from cpr_ext.storage.ids import new_id
from cpr_ext.storage.segment_header import point_metadata

State = Literal["capturing", "captured", "committed", "failed"]
# Copies all that is not a row, given what counts dirty rows that are saved, but captured later.
# Also returns whether the tables and the copy are all that training carries on.
CaptureDense = Callable[[Callable[[], int]], tuple[DensePart, bool]]


class Snapshot:
    """A snapshot in progress, or done; users get a ``SnapshotHandle`` of it.

    The :class:`Saver <cpr_ext.saving.saver.Saver>` drives it.

    Attributes:
        number: counts the snapshots of the store; newer ones are higher.
        kind: ``base`` (all rows) or ``partial`` (selected rows).
        state: ``capturing`` -> ``captured`` -> ``committed``, or ``failed``; it changes while other
            threads work on it.
        rows: those that it saves.
        last_step: the step of its last row and of its dense part.
        num_samples: samples trained at ``last_step``.
        file_bytes: bytes of its two segments.
        live_bytes: of what they hold, as training has it.
        is_at_once: rows were chosen and captured between two steps.
        is_candidate: it holds all dirty rows of one step, and everything else of it.
        compared: names of the tables of which rows are to be compared with what was saved before
            a candidate is complete.
        is_complete: it makes a full-recovery point; granted by :class:`Claims`.
        content: digest of its dense part, once it is committed.
        is_recorded: the store says so, or will.
        is_submitted: it was handed over to be committed.
        error: why it failed.
    """

    def __init__(
        self,
        number: int,
        kind: SnapshotKind,
        context: SnapshotContext,
        capture_dense: CaptureDense,
        options: WriteOptions,
    ) -> None:
        self.number = number
        self._id = new_id()
        self.kind: SnapshotKind = kind
        self.state: State = "capturing"
        self.rows = SnapshotRows(context, number, self._id, kind, options)
        self.last_step = -1
        self.num_samples = 0
        self.file_bytes = self.live_bytes = 0
        self.is_at_once = False
        self.is_candidate = False
        self.compared: frozenset[str] = frozenset()
        self.is_complete = False
        self.is_recorded = False
        self.content = b""
        self.is_submitted = False
        self.error: Exception | None = None
        self._context = context
        self._keys = context.selector.describe_keys()
        self._direct_io = options.direct_io
        self._copy_dense = capture_dense
        self._dense: DensePart | None = None
        self._done = threading.Event()
        self._is_committing = False
        self._creator = Creator()

    @property
    def first_step(self) -> int:
        """The step of its first captured row; -1: none is captured yet."""
        return self.rows.first_step

    @property
    def has_rows_left(self) -> bool:
        """Rows remain to be chosen or captured."""
        return self.state == "capturing" and self.rows.are_left

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Have an error fail the snapshot, and raise nothing."""
        try:
            yield
        except Exception as error:
            self.give_up(error)

    def begin_choosing(self) -> None:
        """Let GPUs choose rows as they are now."""
        with self._failing():
            self.rows.begin_choosing()

    def choose_rows(self, *, wait: bool = True) -> None:
        """Choose rows, see :meth:`SnapshotRows.choose`; on any thread."""
        with self._failing():
            self.rows.choose(wait=wait)

    def capture_rows(
        self,
        step: int,
        *,
        max_bytes: int,
        wait_for_slot: bool,
        stop: native.StopFlag | None = None,
    ) -> bool:
        """Capture rows, see :meth:`SnapshotRows.capture`.

        On any thread, while nothing changes the tables.

        Returns:
            False if there was nothing to do or no slot free.
        """
        progressed = False
        if self.state == "capturing":
            with self._failing():
                progressed = self.rows.capture(
                    step, max_bytes=max_bytes, wait_for_slot=wait_for_slot, stop=stop
                )
        return progressed

    def finish_if_captured(self, step: int, num_samples: int) -> None:
        """If all rows are captured, capture the dense part as it is now; on the training thread."""
        if self.state != "capturing" or self.has_rows_left:
            return
        with self._failing():
            if not self.rows.are_of_fixed_step:
                self._capture_dense(step, num_samples)
            self.state = "captured"

    def fix_step(self, step: int, num_samples: int) -> None:
        """Make this a snapshot of ``step``: all rows and the dense part as they are now.

        Rows are captured later, before they change.
        """
        self.is_at_once = True
        if self.state == "capturing":
            with self._failing():
                self._fix(step, num_samples)

    def gather(self, step: int, num_samples: int, max_bytes: int) -> bool:
        """Copy all rows, which are chosen, on their GPUs: they are captured, at ``step``.

        Args:
            max_bytes: limit of the memory for it.

        Returns:
            False: the rows need more, or a GPU has not as much.
        """
        if self.state == "capturing":
            with self._failing():
                if not self.rows.gather(max_bytes):
                    return False
                self.is_at_once = True
                self._fix(step, num_samples)
                self.state = "captured"
        return True

    def _fix(self, step: int, num_samples: int) -> None:
        self.rows.fix(step)
        self._capture_dense(step, num_samples)

    def _capture_dense(self, step: int, num_samples: int) -> None:
        if self.rows.first_step < 0:
            self.rows.first_step = step
        self.last_step = step
        self.num_samples = num_samples
        holds_all, self.compared = self.rows.judge(were_captured_at_once=self.is_at_once)
        self.is_candidate = self.rows.first_step == step and holds_all
        self._dense, is_accounted = self._copy_dense(self.rows.count_waiting)
        self.is_candidate = self.is_candidate and is_accounted

    def commit(self) -> None:
        """Finish both segments and commit them together. On the commit thread."""
        if self._is_committing:
            return
        self._is_committing = True
        try:
            self._commit()
        except Exception as error:
            self._fail(error)
            return
        try:
            self.rows.free_host_memory()
        finally:  # threads that wait must see the end
            self.state = "committed"
            self._done.set()

    def _commit(self) -> None:
        dense, store = self._dense, self._context.store
        assert dense is not None, "commit() before everything is captured"
        rows = self.rows.finish(self.num_samples)
        self.is_recorded = is_complete = self.is_complete  # it may be granted meanwhile
        # What recovers this snapshot: the segments before it, from the newest base on.
        older = () if self.kind == "base" else store.manifest.at(self.number)
        of_point = older if rows is None else (*older, rows)
        # The dense part is a copy already, so filling the slots needs no training thread.
        capture = SegmentCapture(
            self._context.pipeline,
            store.segments,
            snapshot=self.number,
            snapshot_id=self._id,
            kind="dense",
            sources=dense_sources(dense),
            metadata={
                "skeleton": dense.skeleton,
                **({"keys": self._keys} if self._keys else {}),
                **point_metadata(
                    store.manifest,
                    of_point,
                    steps=(self.last_step, self.last_step),
                    num_samples=self.num_samples,
                    is_complete=is_complete,
                ),
            },
            options=WriteOptions(self._direct_io, refuse_nan=False),
        )
        try:
            while capture.is_capturing:
                capture.capture(self.last_step, max_bytes=0, wait_for_slot=True)
            record = capture.finish(num_samples=self.num_samples, is_complete=is_complete)
            store.add(record, rows)
        except BaseException as error:
            capture.cancel(str(error), keeps_file=store.keeps(capture.file))
            raise
        capture.keep_file()
        self.rows.note_committed()
        self.file_bytes = record.file_bytes + (0 if rows is None else rows.file_bytes)
        self.live_bytes = record.file_bytes + self.rows.live_bytes
        self.content, self._dense = content_digest(dense), None

    def give_up(self, error: Exception | str) -> None:
        """Fail, because of ``error``, unless all is captured; from the training thread."""
        if self.state == "capturing":
            if isinstance(error, str):
                error = SnapshotError(f"snapshot {self.number} was aborted: {error}")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        try:
            self.rows.cancel(str(error))
        finally:  # threads that wait must see the end
            self.error = error
            self.state = "failed"
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Committed or failed."""
        return self._done.is_set()

    def wait_until_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the snapshot is committed or failed; False if the time ran out.

        Only a captured snapshot gets there without further training steps.
        """
        self._creator.require("snapshot")
        return self._done.wait(timeout_seconds)
