"""The rows of one snapshot: chosen shard by shard, captured chunk by chunk, committed or put back.

Used by one thread at a time: the training thread or a capture thread while it captures, and the
commit thread after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cpr_ext._native import native
from cpr_ext.saving.gathered_rows import gather
from cpr_ext.saving.row_choice import RowChoice
from cpr_ext.saving.scrub import Scrub
from cpr_ext.saving.segment_capture import SegmentCapture, Source, WriteOptions, selection_source
from cpr_ext.saving.selection import Selection, Selector, SnapshotKind
from cpr_ext.storage.segment_format import Chunk
from cpr_ext.storage.store import Store
from cpr_ext.tracking.trackers import native_trackers


@dataclass(frozen=True)
class SnapshotContext:
    """What the snapshots of a store share.

    Attributes:
        scrub: keeps hashes of captured rows.
    """

    store: Store
    selector: Selector
    pipeline: native.SnapshotPipeline
    scrub: Scrub


@dataclass
class _ShardRows:
    """The rows of one shard, and their segment.

    Attributes:
        sources: what the rows are captured from; None: the tables.
        capture: None: not begun.
        captured: what trackers forgot of captured rows, put back if the segment is not committed.
    """

    shard: int
    selections: Sequence[Selection]
    sources: Sequence[Source] | None = None
    capture: SegmentCapture | None = None
    captured: native.CapturedRows | None = None
    is_committed: bool = False

    @property
    def is_capturing(self) -> bool:
        return self.capture is None or self.capture.is_capturing

    def watch(self) -> native.CapturedRows:
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


class SnapshotRows:
    """The rows of a snapshot.

    Attributes:
        first_step: the step of the first captured row; -1: none is captured yet.
        bytes_captured: so far.
        are_copied_on_write: rows that wait must be given to :meth:`copy_before_change`.
        are_of_fixed_step: all rows have their values at ``first_step``, whenever captured.
        begin_when_chosen: the segment of a shard begins as soon as its rows are chosen.
    """

    def __init__(
        self, context: SnapshotContext, number: int, kind: SnapshotKind, options: WriteOptions
    ) -> None:
        self.first_step = -1
        self.bytes_captured = 0
        self.are_copied_on_write = False
        self.are_of_fixed_step = False
        self.begin_when_chosen = True
        self._context = context
        self._number = number
        self._kind: SnapshotKind = kind
        self._options = options
        self._precision_of = partial(options.precision_of, kind)
        self._choice = RowChoice(context.selector, kind, context.store.num_shards)
        self._shards: list[_ShardRows] = []

    @property
    def are_chosen(self) -> bool:
        """All rows are chosen."""
        return self._choice.is_done

    @property
    def are_left(self) -> bool:
        """Rows remain to be chosen or captured."""
        return not self.are_chosen or any(each.is_capturing for each in self._shards)

    def begin_choosing(self) -> None:
        """Let GPUs choose rows as they are now."""
        self._choice.begin()

    def choose(
        self, stop: native.StopFlag | None = None, *, one_table: bool = False, wait: bool = True
    ) -> None:
        """Choose rows.

        Args:
            stop: once it is set, returns after the current table.
            one_table: choose those of the next table only, instead of all.
            wait: wait for a GPU that chooses, instead of returning.
        """
        while not self.are_chosen and (wait or not self._choice.is_pending):
            self._choose_next(stop)
            if one_table or (stop is not None and stop.is_set()):
                return

    def _choose_next(self, stop: native.StopFlag | None) -> None:
        """Choose rows of the next table of a shard; after its last, start the shard's segment."""
        chosen = self._choice.choose_next(stop)
        if chosen is None:
            return
        shard, of_shard = chosen
        selections = [selection for selection in of_shard if selection.num_rows > 0]
        if selections:
            self._shards.append(_ShardRows(shard, selections))
            if self.begin_when_chosen:
                self._begun(self._shards[-1])

    def _begun(self, rows: _ShardRows) -> SegmentCapture:
        """Return the capture of a shard, which begins now if it had not."""
        if rows.capture is None:
            context = self._context
            manifest = context.store.shards[rows.shard]
            manifest.require_in_place()
            rows.capture = SegmentCapture(
                context.pipeline,
                manifest,
                snapshot=self._number,
                kind=self._kind,
                sources=rows.sources
                or [
                    selection_source(each, self._precision_of, context.scrub.hashes_of(each.table))
                    for each in rows.selections
                ],
                metadata={"shard": rows.shard},
                options=self._options,
                # Rows that a device holds a copy of are taken by then.
                captured=rows.watch() if rows.captured is None else None,
            )
            rows.sources = None
        return rows.capture

    def capture(
        self,
        step: int,
        *,
        max_bytes: int,
        wait_for_slot: bool,
        stop: native.StopFlag | None = None,
    ) -> bool:
        """Capture rows with their values at ``step``; return whether anything was done.

        Args:
            max_bytes: about how much to capture in this call; 0: no limit.
            wait_for_slot: wait for the disk, and for a GPU that chooses, instead of returning.
            stop: once it is set, returns after the current chunk.
        """
        done = 0
        index = 0
        if self.are_copied_on_write and self._begin_all(stop):
            return True
        while True:
            if index == len(self._shards):
                if self.are_chosen or (not wait_for_slot and self._choice.is_pending):
                    return done > 0
                self._choose_next(stop)
                if stop is not None and stop.is_set():
                    return True
                continue
            rows = self._shards[index]
            index += 1
            if not rows.is_capturing:
                continue
            if 0 < max_bytes <= done:
                return True
            chunks = self._begun(rows).capture(
                self.first_step if self.are_of_fixed_step else step,
                max_bytes=max_bytes - done if max_bytes else 0,
                wait_for_slot=wait_for_slot,
                stop=stop,
            )
            done += self._note_captured(rows, chunks, step)
            if (stop is not None and stop.is_set()) or rows.is_capturing:
                return done > 0

    def _begin_all(self, stop: native.StopFlag | None) -> bool:
        """Begin all segments here: an optimizer's step would wait for it; True: was stopped."""
        for rows in self._shards:
            if rows.capture is None:
                self._begun(rows)
                if stop is not None and stop.is_set():
                    return True
        return False

    def _note_captured(self, rows: _ShardRows, chunks: Sequence[Chunk], step: int) -> int:
        """Note that chunks are captured; returns their bytes."""
        if chunks and self.first_step < 0:
            self.first_step = step
        for chunk in chunks:
            selection = rows.selections[chunk.table]
            self._context.scrub.note_captured(selection, chunk.first, chunk.num_rows)
        capture = self._begun(rows)
        captured_bytes = sum(capture.chunk_bytes(chunk.table, chunk.num_rows) for chunk in chunks)
        self.bytes_captured += captured_bytes
        return captured_bytes

    def fix(self, step: int) -> None:
        """Make all rows, which are chosen, those of ``step``, whenever they are captured."""
        self._context.scrub.fix([each for rows in self._shards for each in rows.selections])
        self.first_step = step
        self.are_of_fixed_step = True

    def gather(self, max_bytes: int) -> bool:
        """Copy all rows, which are chosen, on their GPUs; False: there is no memory for that."""
        selections = [each for rows in self._shards for each in rows.selections]
        found = gather(selections, max_bytes, self._precision_of, self._context.scrub.hashes_of)
        if found is None:
            return False
        sources = iter(found)
        for rows in self._shards:
            rows.sources = [next(sources) for _ in rows.selections]
            rows.watch().take_all()
        return True

    def copy_before_change(self, changing: Mapping[str, torch.Tensor]) -> None:
        """Copy those rows (n,) of tables that are about to change and not yet captured.

        Where the memory for it is full, rows are captured until there is room.
        """
        for rows in self._shards:
            names = [selection.table.name for selection in rows.selections]
            left = [(at, changing[name]) for at, name in enumerate(names) if name in changing]
            capture = self._begun(rows)
            while left := capture.copy_before_change(left):
                self.capture(self.first_step, max_bytes=1, wait_for_slot=True)

    def are_complete(self) -> bool:
        """Return whether with them the store holds every row as it is."""
        return self._context.selector.are_complete(
            self._choice.selections, is_captured=not self.are_copied_on_write
        )

    def count_waiting(self) -> int:
        """Return dirty rows that are saved, but captured later."""
        if not self.are_copied_on_write:
            return 0
        return sum(each.num_dirty() for rows in self._shards for each in rows.selections)

    def commit(self, num_samples: int) -> int:
        """Finish every segment and commit it; return the bytes of the files.

        REQUIRES: all rows are captured, or gathered.
        """
        file_bytes = 0
        for rows in self._shards:
            capture = self._begun(rows)
            while capture.is_capturing:  # from copies, which need no training thread
                capture.capture(self.first_step, max_bytes=0, wait_for_slot=True)
            record = capture.finish(num_samples=num_samples)
            self._context.store.add_to_shard(rows.shard, record)
            capture.mark_committed()
            rows.is_committed = True
            file_bytes += record.file_bytes
        return file_bytes

    def free_host_memory(self) -> None:
        """Free what was kept for a failure, on the commit thread: training would wait for it."""
        for rows in self._shards:
            if all(each.tracker.device is None for each in rows.selections):
                rows.forget()
                for selection in rows.selections:
                    selection.forget()

    def cancel(self, reason: str) -> None:
        """Abort the segments that are not committed."""
        for rows in self._shards:
            rows.sources = None
            if not rows.is_committed and rows.capture is not None:
                rows.capture.cancel(reason)

    def put_back(self) -> None:
        """Give the rows of a failed save their priority back; from the training thread."""
        for rows in self._shards:
            if not rows.is_committed and rows.captured is not None:
                rows.captured.put_back()
        self.forget_taken()

    def forget_taken(self) -> None:
        """Free what trackers gave for captured rows, and their ids: both may be on a GPU."""
        for rows in self._shards:
            rows.forget()
            for selection in rows.selections:
                selection.chosen = None
