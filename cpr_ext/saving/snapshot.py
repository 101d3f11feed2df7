"""One snapshot of all shards of this process and of the dense part.

The training thread drives :meth:`Snapshot.capture_rows` between steps, or a capturing thread does
while training reads the tables. When all is captured, a committer thread runs
:meth:`Snapshot.commit`. Only one of them works on a snapshot at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.forks import Creator
from cpr_ext.saving.capture_mode import CaptureMode
from cpr_ext.saving.gathered_rows import gather
from cpr_ext.saving.row_choice import RowChoice
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.segment_capture import (
    SegmentCapture,
    Source,
    WriteOptions,
    dense_sources,
    selection_source,
)
from cpr_ext.saving.selection import Selection, Selector, SnapshotKind
from cpr_ext.state.dense_state import DensePart
from cpr_ext.storage.segment_format import Chunk
from cpr_ext.storage.store import Store
from cpr_ext.tracking.trackers import native_trackers

State = Literal["capturing", "captured", "committed", "failed"]
# Copies all that is not a row, given what counts dirty rows that are saved, but captured later.
CaptureDense = Callable[[Callable[[], int]], DensePart]

OnCommitted = Callable[["Snapshot", DensePart], None]


@dataclass
class _Part:
    """The segment of one shard."""

    shard: int
    selections: Sequence[Selection]
    # What the rows are captured from; None: the tables.
    sources: Sequence[Source] | None = None
    capture: SegmentCapture | None = None  # None: not begun
    # What trackers forgot of captured rows, put back if the segment is not committed.
    captured: Any = None
    is_committed: bool = False

    def watch(self) -> Any:
        """Have trackers forget each row when it is captured."""
        self.captured = native.CapturedRows()
        for each in self.selections:
            self.captured.add_table(
                trackers=native_trackers(each.tracker),
                weight=each.table.weight,
                begin=each.begin,
                end=each.end,
                row_ids=each.row_ids,
                chosen=each.chosen,
            )
        return self.captured

    def forget(self) -> None:
        """Free what trackers gave for captured rows."""
        if self.captured is not None:
            self.captured.forget()


def _is_capturing(part: _Part) -> bool:
    return part.capture is None or part.capture.is_capturing


class Snapshot:
    """A snapshot in progress, or done; users get a ``SnapshotHandle`` of it.

    Attributes:
        number: counts the snapshots of the store; newer ones are higher.
        kind: ``base`` (all rows) or ``partial`` (selected rows).
        state: ``capturing`` -> ``captured`` -> ``committed``, or ``failed``.
        first_step, last_step: the steps at which rows were captured.
        num_samples: samples trained at ``last_step``.
        file_bytes: bytes of all its segments.
        bytes_captured: bytes of rows captured so far.
        is_complete: it makes a full-recovery point.
        is_scrubbed: and a pass of the scrub has found since that this is true.
        is_read_back: and its files, or others of the same form, were read back as captured.
        is_submitted: it was handed over to be committed.
        mode: how rows are chosen and captured; :meth:`fix_step` and :meth:`gather` change it.
        error: why it failed.

    Args:
        scrub: keeps hashes of the rows.
        is_accounted: whether the tables and the dense part are all that training carries on.
        on_committed: called with it and its dense part by the thread that commits it, before any
            other snapshot can begin.
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
        capture_dense: CaptureDense,
        scrub: Scrub,
        is_accounted: Callable[[], bool],
        on_committed: OnCommitted = lambda snapshot, dense: None,
        mode: CaptureMode = CaptureMode.AT_ONCE,
    ) -> None:
        self._scrub = scrub
        self._is_accounted = is_accounted
        self._on_committed: OnCommitted | None = on_committed
        self.number = number
        self.kind: SnapshotKind = kind
        self._state: State = "capturing"
        self.first_step = -1
        self.last_step = -1
        self.num_samples = 0
        self.file_bytes = 0
        self.bytes_captured = 0
        self.is_complete = False
        self.is_scrubbed = False
        self.is_read_back = False
        self.mode = mode
        self.error: Exception | None = None
        self._store = store
        self._selector = selector
        self._pipeline = pipeline
        self._options = options
        self._capture_dense = capture_dense
        self._dense: DensePart | None = None
        self._done = threading.Event()
        self.is_submitted = False
        self._is_committing = False
        self._creator = Creator()
        self._parts: list[_Part] = []
        self._choice = RowChoice(selector, kind, store.num_shards)
        if mode in (CaptureMode.SHARD_BY_SHARD, CaptureMode.GATHER):
            self._begin_choosing()
        elif mode is not CaptureMode.CHOOSE_FIRST:
            self.choose_rows()

    @property
    def is_proven(self) -> bool:
        """Its claim to be complete was confirmed, by a pass of the scrub and by reading it."""
        return self.is_complete and self.is_scrubbed and self.is_read_back

    @property
    def is_copied_on_write(self) -> bool:
        """Rows that wait for their capture must be copied before they change."""
        return self.mode is CaptureMode.COPY_ON_WRITE

    @property
    def is_of_fixed_step(self) -> bool:
        """The step of all rows is given, whenever they are captured."""
        return self.mode in (CaptureMode.COPY_ON_WRITE, CaptureMode.GATHERED)

    def _begin_choosing(self) -> None:
        try:
            self._choice.begin()
        except Exception as error:
            self._fail(error)

    def choose_rows(self, stop: Any = None, *, one_table: bool = False, wait: bool = True) -> None:
        """Choose rows, on any thread.

        Args:
            stop: a native ``StopFlag``; once it is set, returns after the current table.
            one_table: choose those of the next table only, instead of all.
            wait: wait for a GPU that chooses, instead of returning.
        """
        try:
            while not self.is_chosen:
                if not wait and self._choice.is_pending:
                    return
                self._choose_next(stop)
                if one_table or (stop is not None and stop.is_set()):
                    return
        except Exception as error:
            self._fail(error)

    @property
    def is_chosen(self) -> bool:
        """All rows are chosen."""
        return self._choice.is_done

    def _choose_next(self, stop: Any) -> None:
        """Choose rows of the next table of a shard; after its last, start the shard's segment."""
        chosen = self._choice.choose_next(stop)
        if chosen is None:
            return
        shard, of_shard = chosen
        selections = [selection for selection in of_shard if selection.num_rows > 0]
        if selections:
            self._parts.append(_Part(shard, selections))
            if self.mode not in (CaptureMode.GATHER, CaptureMode.COPY_ON_WRITE):
                self._begun(self._parts[-1])

    def _begun(self, part: _Part) -> SegmentCapture:
        """Return the capture of a part, which begins now if it had not."""
        if part.capture is None:
            manifest = self._store.shards[part.shard]
            manifest.require_in_place()
            part.capture = SegmentCapture(
                self._pipeline,
                manifest,
                snapshot=self.number,
                kind=self.kind,
                sources=part.sources
                or [
                    selection_source(each, self._precision_of, self._scrub.hashes_of(each.table))
                    for each in part.selections
                ],
                metadata={"shard": part.shard},
                options=self._options,
                # Rows that a device holds a copy of are taken by then.
                captured=part.watch() if part.captured is None else None,
            )
            part.sources = None
        return part.capture

    def _precision_of(self, array: str) -> str:
        return self._options.precision_of(self.kind, array)

    @property
    def has_rows_left(self) -> bool:
        """Rows remain to be chosen or captured."""
        return self._state == "capturing" and (
            not self.is_chosen or any(map(_is_capturing, self._parts))
        )

    def capture_rows(
        self, step: int, *, max_bytes: int, wait_for_slot: bool, stop: Any = None
    ) -> bool:
        """Capture rows with their values at ``step``; with COPY_ON_WRITE, at its own step.

        On any thread, while nothing changes the tables.

        Args:
            max_bytes: about how much to capture in this call; 0: no limit.
            wait_for_slot: wait for the disk, and for a GPU that chooses, instead of returning.
            stop: a native ``StopFlag``; once it is set, returns after the current chunk.

        Returns:
            False if there was nothing to do or no slot free.
        """
        if self._state != "capturing":
            return False
        try:
            return self._capture_rows(step, max_bytes, wait_for_slot, stop)
        except Exception as error:
            self._fail(error)
            return False

    def _capture_rows(self, step: int, max_bytes: int, wait_for_slot: bool, stop: Any) -> bool:
        if self.is_copied_on_write:  # all at once: an optimizer's step would wait for it
            for part in self._parts:
                if part.capture is None:
                    self._begun(part)
                    if stop is not None and stop.is_set():
                        return True
        captured_bytes = 0
        index = 0
        while True:
            if index == len(self._parts):
                if self.is_chosen or (not wait_for_slot and self._choice.is_pending):
                    break
                self._choose_next(stop)
                if stop is not None and stop.is_set():
                    return True
                continue
            part = self._parts[index]
            index += 1
            if not _is_capturing(part):
                continue
            if 0 < max_bytes <= captured_bytes:
                break
            chunks = self._begun(part).capture(
                self.first_step if self.is_of_fixed_step else step,
                max_bytes=max_bytes - captured_bytes if max_bytes else 0,
                wait_for_slot=wait_for_slot,
                stop=stop,
            )
            captured_bytes += self._note_captured(part, chunks, step)
            was_stopped = stop is not None and stop.is_set()
            if was_stopped or _is_capturing(part):
                break
        return captured_bytes > 0

    def finish_if_captured(self, step: int, num_samples: int) -> None:
        """If all rows are captured, capture the dense part as it is now; on the training thread."""
        if self._state != "capturing" or self.has_rows_left:
            return
        try:
            if self.is_of_fixed_step:
                self._state = "captured"
            else:
                self._finish_capture(step, num_samples)
        except Exception as error:
            self._fail(error)

    def fix_step(self, step: int, num_samples: int) -> None:
        """Make this a snapshot of ``step``: all rows, which are chosen, and the dense part, as now.

        Rows are captured later, so each must be given to :meth:`copy_before_change`.
        """
        self.mode = CaptureMode.COPY_ON_WRITE
        if self._state != "capturing":
            return
        try:
            self._fix(step, num_samples)
        except Exception as error:
            self._fail(error)

    def gather(self, step: int, num_samples: int, max_bytes: int, otherwise: CaptureMode) -> bool:
        """Copy all rows, which are chosen, on their GPUs: this is a snapshot of ``step`` then.

        Args:
            max_bytes: limit of the memory for it.
            otherwise: the mode if the rows need more, or a GPU has not as much.

        Returns:
            Whether the rows are copied.
        """
        if self._state != "capturing":
            return False
        try:
            selections = [each for part in self._parts for each in part.selections]
            found = gather(selections, max_bytes, self._precision_of)
            if found is None:
                self.mode = otherwise
                return False
            sources = iter(found)
            for part in self._parts:
                part.sources = [next(sources) for _ in part.selections]
                part.watch().take_all()
            self.mode = CaptureMode.GATHERED
            self._fix(step, num_samples)
        except Exception as error:
            self._fail(error)
        return self._state == "capturing"

    def _fix(self, step: int, num_samples: int) -> None:
        """Save all rows and the dense part as they are at this step, whenever they are captured."""
        self._scrub.fix([each for part in self._parts for each in part.selections])
        self.first_step = step
        self._finish_capture(step, num_samples)
        self._state = "capturing"

    def copy_before_change(self, table: str, row_ids: torch.Tensor) -> None:
        """Copy rows of ``table`` that are about to change and not yet captured.

        Where the memory for it is full, rows are captured until there is room.
        """
        if self._state != "capturing":
            return
        try:
            for part in self._parts:
                for index, selection in enumerate(part.selections):
                    if selection.table.name == table:
                        self._copy(part, index, row_ids)
        except Exception as error:
            self._fail(error)

    def _copy(self, part: _Part, index: int, row_ids: torch.Tensor) -> None:
        done = 0
        capture = self._begun(part)
        while (done := capture.copy_before_change(index, row_ids, done)) < row_ids.numel():
            self._capture_rows(self.first_step, max_bytes=1, wait_for_slot=True, stop=None)

    def _note_captured(self, part: _Part, chunks: Sequence[Chunk], step: int) -> int:
        """Note that chunks are captured; returns their bytes."""
        if chunks and self.first_step < 0:
            self.first_step = step
        for chunk in chunks:
            self._scrub.note_captured(part.selections[chunk.table], chunk.first, chunk.num_rows)
        capture = self._begun(part)
        captured_bytes = sum(capture.chunk_bytes(chunk.table, chunk.num_rows) for chunk in chunks)
        self.bytes_captured += captured_bytes
        return captured_bytes

    def _finish_capture(self, step: int, num_samples: int) -> None:
        self.first_step = step if self.first_step < 0 else self.first_step
        self.last_step = step
        self.num_samples = num_samples
        self.is_complete = (
            self.first_step == step
            and self._is_accounted()
            and all(
                self._selector.is_complete(each, is_captured=not self.is_copied_on_write)
                for each in self._choice.selections
            )
        )
        self._dense = self._capture_dense(self._count_waiting)
        self._state = "captured"

    def _count_waiting(self) -> int:
        if not self.is_copied_on_write:
            return 0
        selections = [each for part in self._parts for each in part.selections]
        return sum(each.num_dirty() for each in selections)

    def commit(self) -> None:
        """Finish every segment and commit it; the dense part last. On the committer's thread."""
        if self._is_committing:
            return
        self._is_committing = True
        try:
            for part in self._parts:
                capture = self._begun(part)
                record = capture.finish(num_samples=self.num_samples)
                self._store.add_to_shard(part.shard, record)
                capture.mark_committed()
                part.is_committed = True
                self.file_bytes += record.file_bytes
            dense = self._commit_dense()
            self._store.retain()
        except Exception as error:
            self._fail(error)
        else:
            try:
                self._free_host_memory()
                self._tell_committed(dense)
            finally:  # threads that wait must see the end
                self._state = "committed"
                self._done.set()

    def _tell_committed(self, dense: DensePart) -> None:
        # Who is told may keep the snapshot, which must not keep it.
        on_committed, self._on_committed = self._on_committed, None
        if on_committed is not None:
            on_committed(self, dense)

    def _free_host_memory(self) -> None:
        """Free what was kept for a failure, here: training would wait for the system."""
        for part in self._parts:
            if all(each.tracker.device is None for each in part.selections):
                part.forget()
                for selection in part.selections:
                    selection.forget()

    def _commit_dense(self) -> DensePart:
        dense = self._dense
        assert dense is not None, "commit() before everything is captured"
        # The dense part is a copy already, so filling the slots needs no training thread.
        capture = SegmentCapture(
            self._pipeline,
            self._store.dense,
            snapshot=self.number,
            kind="dense",
            sources=dense_sources(dense),
            metadata={
                "skeleton": dense.skeleton,
                "shards": [manifest.chain for manifest in self._store.shards],
            },
            options=WriteOptions(self._options.direct_io, refuse_nan=False),
        )
        while capture.is_capturing:
            capture.capture(self.last_step, max_bytes=0, wait_for_slot=True)
        record = capture.finish(num_samples=self.num_samples, is_complete=self.is_complete)
        self._store.add_dense(record)
        capture.mark_committed()
        self.file_bytes += record.file_bytes
        self._dense = None
        return dense

    def cancel(self, reason: str) -> None:
        """Abort a snapshot that is still capturing; from the training thread."""
        self.give_up(SnapshotError(f"snapshot {self.number} was aborted: {reason}"))

    def give_up(self, error: Exception) -> None:
        """Fail, because of ``error``, unless all is captured; from the training thread."""
        if self._state == "capturing":
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        try:
            for part in self._parts:
                part.sources = None
                if not part.is_committed and part.capture is not None:
                    part.capture.cancel(str(error))
        finally:  # threads that wait must see the end
            self.error = error
            self._state = "failed"
            self._done.set()

    def put_back(self) -> None:
        """Give the rows of a failed save their priority back; from the training thread."""
        for part in self._parts:
            if not part.is_committed and part.captured is not None:
                part.captured.put_back()
        self.forget_taken()

    def forget_taken(self) -> None:
        """Free what trackers gave for captured rows, and their ids: both may be on a GPU."""
        for part in self._parts:
            part.forget()
            for selection in part.selections:
                selection.chosen = None

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
        self._creator.require("snapshot")
        return self._done.wait(timeout_seconds)
