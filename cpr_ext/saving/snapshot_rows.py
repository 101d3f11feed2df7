"""The rows of one snapshot: chosen table by table, captured chunk by chunk, finished or put back.

Used by one thread at a time: the training thread or a capture thread while it captures, and the
commit thread after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.cuda import device_of, stager_of
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.saved_hashes import SavedHashes
from cpr_ext.saving.segment_capture import (
    SegmentCapture,
    Source,
    TableSource,
    WriteOptions,
    table_source,
)
from cpr_ext.saving.selection import Selection, Selector, SnapshotKind
from cpr_ext.state.table import WEIGHT, Table
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.store import Store

logger = logger_of("saving")

# So often choosing rows of a table is interrupted by training; then training waits for it.
_MOST_STOPS = 3


class TableSources:
    """What rows are captured from, kept from snapshot to snapshot.

    A table has another one once the memory, form or precision of an array is another than then.
    Until that is seen, the memory that it had stays alive.

    Args:
        hashes: record captured rows.
    """

    def __init__(self, hashes: SavedHashes) -> None:
        self._hashes = hashes
        # By table: what its hashes take for its form, the precision of its weight, and the source.
        self._kept: dict[str, tuple[object, str, TableSource]] = {}

    def of(self, table: Table, precision_of: Callable[[str], str]) -> TableSource:
        """Return what rows of a table are captured from, as it is now.

        Args:
            precision_of: of an array of the table, by its name; that of state is always the same.

        Raises:
            UsageError: its weight was replaced, or it cannot be stored any more.
        """
        arrays, precision = table.arrays(), precision_of(WEIGHT)
        form, known, source = self._kept.get(table.name, (None, "", None))
        is_like = known == precision and form is self._hashes.form_of(table)
        if source and is_like and [*arrays] == [*source.arrays] and source.is_of(arrays):
            return source
        hashes = self._hashes.recorder_of(table, arrays)
        source = table_source(table.name, arrays, precision_of, hashes=hashes)
        self._kept[table.name] = self._hashes.form_of(table), precision, source
        return source

    def forget(self, table: Table) -> None:
        """Let go of the memory that a table had."""
        self._kept.pop(table.name, None)

    def close(self) -> None:
        """Let go of all memory."""
        self._kept.clear()


@dataclass(frozen=True)
class SnapshotContext:
    """What the snapshots of a store share.

    Attributes:
        hashes: of captured rows.
        sources: what they are captured from.
    """

    store: Store
    selector: Selector
    pipeline: native.SnapshotPipeline
    hashes: SavedHashes
    sources: TableSources


class SnapshotRows:
    """The rows of a snapshot.

    Attributes:
        first_step: the step of the first captured row; -1: none is captured yet.
        bytes_captured: so far, in staging slots.
        live_bytes: of all its rows, as training has them.
        are_all_dirty: rows are chosen whatever their priority: all that are dirty.
        are_of_fixed_step: all rows have their values at ``first_step``, whenever captured.
        is_committed: the manifest names its segments.
    """

    def __init__(
        self,
        context: SnapshotContext,
        number: int,
        snapshot_id: str,
        kind: SnapshotKind,
        options: WriteOptions,
    ) -> None:
        self.first_step = -1
        self.bytes_captured = self.live_bytes = 0
        self.are_all_dirty = False
        self.are_of_fixed_step = False
        self.is_committed = False
        self._are_gathered = False
        self._moving: frozenset[str] = frozenset()  # tables of which all rows are dirty at a step
        self._context = context
        self._number = number
        self._id = snapshot_id
        self._kind: SnapshotKind = kind
        self._options = options
        self._precision_of = partial(options.precision_of, kind)
        self._chosen: list[Selection] = []  # of the tables of which all rows are chosen
        self._pending: dict[str, native.PendingRows] = {}  # what GPUs choose, by table
        self._num_stopped = 0  # so often choosing rows of the next table was interrupted
        self._selections: list[Selection] = []  # but for tables without rows to save
        self._tables: dict[str, tuple[Table, TableSource]] = {}
        self._sources: list[Source] | None = None  # the copies of GPUs; None: the tables
        self._segment: SegmentCapture | None = None  # None: not begun
        # What trackers forgot of captured rows, put back if the segment is not committed.
        self._captured: native.CapturedRows | None = None

    @property
    def are_chosen(self) -> bool:
        """All rows are chosen."""
        return len(self._chosen) == len(self._context.selector.tables)

    @property
    def are_left(self) -> bool:
        """Rows remain to be chosen or captured."""
        return not self.are_chosen or self._is_capturing

    @property
    def _is_capturing(self) -> bool:
        if self._segment is not None:
            return self._segment.is_capturing
        return bool(self._selections)

    def begin_choosing(self) -> None:
        """Let GPUs choose rows as they are now; :meth:`choose` reads which they are."""
        if self._kind == "base":
            return
        selector = self._context.selector
        selector.record_weights()
        for table in selector.tables:
            if (pending := selector.begin_partial(table)) is not None:
                self._pending[table.name] = pending

    @property
    def _is_pending(self) -> bool:
        """Whether a GPU has not chosen the next rows yet."""
        if self.are_chosen:
            return False
        pending = self._pending.get(self._context.selector.tables[len(self._chosen)].name)
        return pending is not None and not pending.is_ready()

    def choose(self, stop: native.StopFlag | None = None, *, wait: bool = True) -> bool:
        """Choose rows of the next tables; return whether all rows are chosen then.

        Args:
            stop: once it is set, the next rows are left for another call; but not more often than a
                few times.
            wait: wait for a GPU that chooses, instead of returning.
        """
        if self.are_chosen:
            return True
        moving = self._moving | self._context.selector.moving()
        for table in self._context.selector.tables[len(self._chosen) :]:
            if not wait and self._is_pending:
                return False
            stopped_by = None if self._num_stopped >= _MOST_STOPS else stop
            found = self._choose(table, moving, stopped_by)
            if found is not None:
                self._chosen.append(found)
            self._num_stopped = self._num_stopped + 1 if found is None else 0
            if stop is not None and stop.is_set():
                break
        if len(self._chosen) < len(self._context.selector.tables):
            return False
        self._selections = [each for each in self._chosen if each.num_rows > 0]
        for each in self._selections:
            if each.row_ids is None:
                self._context.hashes.note_whole(each.table)
        return True

    def _choose(
        self, table: Table, moving: Collection[str], stop: native.StopFlag | None
    ) -> Selection | None:
        selector = self._context.selector
        if self._kind == "base":
            return selector.base(table)
        if (pending := self._pending.pop(table.name, None)) is not None:
            return selector.end_partial(table, pending)
        return selector.partial(table, moving, stop, all_dirty=self.are_all_dirty)

    def _begun(self) -> SegmentCapture:
        """Return the capture of the segment, which begins now if it had not."""
        if self._segment is None:
            context = self._context
            context.store.require_in_place()
            sources = self._sources
            if sources is None:
                sources = [self._source_of(each) for each in self._selections]
            # Rows that a device holds a copy of are taken by then.
            captured = self._watch(sources) if self._captured is None else None
            self._segment = SegmentCapture(
                context.pipeline,
                context.store.segments,
                snapshot=self._number,
                snapshot_id=self._id,
                kind=self._kind,
                sources=sources,
                metadata={},
                options=self._options,
                captured=captured,
            )
            self._sources = None
        return self._segment

    def _source_of(self, selection: Selection) -> Source:
        of_table = self._table(selection.table)
        self.live_bytes += selection.num_rows * of_table.row_bytes
        if selection.row_ids is None:
            return of_table.range(0, selection.num_rows)
        return of_table.rows(selection.row_ids)

    def _table(self, table: Table) -> TableSource:
        """Return what rows of a table are captured from."""
        if (known := self._tables.get(table.name)) is None:
            known = table, self._context.sources.of(table, self._precision_of)
            self._tables[table.name] = known
        return known[1]

    def _watch(self, sources: Sequence[Source]) -> native.CapturedRows:
        """Have trackers forget each row of the sources when it is captured."""
        self._captured = native.CapturedRows()
        chosen = [each.chosen for each in self._selections]
        self._captured.add_tables(
            [native.TrackedTable((each.tracker,), each.table.weight) for each in self._selections],
            [source.table for source in sources],
            chosen if any(chosen) else [],  # type: ignore[arg-type]  # some are None
        )
        return self._captured

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

        Raises:
            SnapshotError: a table's memory was replaced since the snapshot began.
        """
        if not all(source.is_of(table.arrays()) for table, source in self._tables.values()):
            raise SnapshotError(
                "a table or its optimizer state was replaced while it was being saved (model.to(), "
                "load_state_dict() or a new parameter); call wait() before such a change"
            )
        if not self.are_chosen:
            if not wait_for_slot and self._is_pending:
                return False
            if not self.choose(stop, wait=wait_for_slot) or (stop is not None and stop.is_set()):
                return True
        if not self._is_capturing:
            return False
        capture = self._begun()
        chunks = capture.capture(
            self.first_step if self.are_of_fixed_step else step,
            max_bytes=max_bytes,
            wait_for_slot=wait_for_slot,
            stop=stop,
        )
        if chunks and self.first_step < 0:
            self.first_step = step
        before, self.bytes_captured = self.bytes_captured, capture.captured_bytes
        return self.bytes_captured > before

    def fix(self, step: int) -> None:
        """Make all rows those of ``step``, whenever they are captured."""
        self.first_step = step
        self.are_of_fixed_step = True

    def gather(self, max_bytes: int) -> bool:
        """Copy all rows, which are chosen, on their GPUs; False: there is no memory for that."""
        found = gather(self._selections, max_bytes, self._table, self._precision_of)
        if found is None:
            return False
        if found:
            self._sources = found
            self._watch(found).take_all()
        of_tables = ((each.num_rows, self._table(each.table)) for each in self._selections)
        self.live_bytes = sum(num_rows * source.row_bytes for num_rows, source in of_tables)
        self._tables = {}
        self._are_gathered = True
        return True

    @property
    def have_all_dirty(self) -> bool:
        """Whether all rows that were dirty when they were chosen are among them."""
        return self.are_chosen and all(each.has_room for each in self._chosen)

    def judge(self, *, were_captured_at_once: bool) -> tuple[bool, frozenset[str]]:
        """Judge what the store holds with them, at the step of the dense part.

        Args:
            were_captured_at_once: between two steps: of tables that it holds whole, no row differs.

        Returns:
            Whether it holds every row as it is, as far as trackers know; and the names of tables of
            which rows may differ all the same. Those whose optimizer moves rows without a gradient
            cannot be compared, and are left out.
        """
        selector = self._context.selector
        self._moving = selector.moving()
        held: set[str] = set()
        if were_captured_at_once and (self.are_chosen or not self.are_all_dirty):
            held = {each.table.name for each in self._chosen if each.row_ids is None}
        compared = {table.name for table in selector.tables} - self._moving - held
        if self.are_all_dirty and self.are_of_fixed_step:
            return not selector.any_changed(), frozenset(compared)
        is_captured = self._are_gathered or not self.are_of_fixed_step
        is_complete = selector.are_complete(self._chosen, self._moving, is_captured=is_captured)
        return is_complete, frozenset(compared)

    def count_waiting(self) -> int:
        """Return dirty rows that are saved, but captured later."""
        if self._are_gathered or not self.are_of_fixed_step:
            return 0
        if self.are_all_dirty:
            return self._context.selector.num_dirty()
        whole = [each.tracker for each in self._selections if each.row_ids is None]
        chosen = sum(each.num_rows for each in self._selections if each.row_ids is not None)
        return chosen + sum(native.num_dirty_of(whole))

    def finish(self, num_samples: int) -> SegmentRecord | None:
        """Finish the segment; return what the manifest is to say of it; None: there are no rows.

        REQUIRES: all rows are captured, or gathered.
        """
        if not self._selections:
            return None
        capture = self._begun()
        while capture.is_capturing:  # from copies, which need no training thread
            capture.capture(self.first_step, max_bytes=0, wait_for_slot=True)
        return capture.finish(num_samples=num_samples)

    def note_committed(self) -> None:
        """Record that the manifest names the segment."""
        self.is_committed = True
        if self._segment is not None:
            self._segment.keep_file()
        self._tables = {}  # a user may keep the snapshot for long

    def free_host_memory(self) -> None:
        """Free what was kept for a failure, on the commit thread: training would wait for it."""
        if all(each.tracker.device is None for each in self._selections):
            self._forget_captured()
            for selection in self._selections:
                selection.forget()

    def cancel(self, reason: str) -> None:
        """Abort the segment; its file goes unless the store needs it."""
        self._sources = None
        if (segment := self._segment) is not None:
            segment.cancel(reason, keeps_file=self._context.store.keeps(segment.file))
        self._tables = {}

    def put_back(self) -> None:
        """Give the rows of a failed save their priority back; from the training thread."""
        if not self.is_committed and self._captured is not None:
            self._captured.put_back()
            for selection in self._selections:
                if selection.row_ids is None:  # clean rows have hashes of what is not saved
                    self._context.hashes.forget_table(selection.table)
        self.forget_taken()

    def forget_taken(self) -> None:
        """Free what trackers gave for captured rows, and their ids: both may be on a GPU."""
        self._forget_captured()
        for selection in self._selections:
            selection.chosen = None

    def _forget_captured(self) -> None:
        if self._captured is not None:
            self._captured.forget()


def bytes_of(selections: Sequence[Selection]) -> int:
    """Return the bytes of all rows, with every per-row state, and of their ids on the device."""
    return sum(
        selection.num_rows * (8 + array.element_size() * array[:1].numel())
        for selection in selections
        for array in selection.table.arrays().values()
    )


def gather(
    selections: Sequence[Selection],
    max_bytes: int,
    source_of: Callable[[Table], TableSource],
    precision_of: Callable[[str], str],
) -> list[Source] | None:
    """Copy the rows as they are when training's streams get here.

    Args:
        source_of: what the rows of a table are captured from.
        precision_of: of an array of a table, by its name. The copies are exact; they are rounded
            on their way to the host.

    Returns:
        What to capture each selection from; None if the copies take more than ``max_bytes``, or
        more than a device has.
    """
    needed = bytes_of(selections)
    if needed > max_bytes:
        logger.info(
            "a snapshot's rows of %d bytes are not gathered at one step: gather_bytes is %d",
            needed,
            max_bytes,
        )
        return None
    try:
        sources = [_gathered(each, source_of(each.table), precision_of) for each in selections]
    except torch.cuda.OutOfMemoryError as error:
        logger.info("a snapshot's rows are not gathered at one step: %s", error)
        return None
    weights = (each.table.weight for each in selections)
    for weight in {device_of(weight): weight for weight in weights}.values():
        stager_of(weight).settle()
    return sources


def _gathered(
    selection: Selection, source: TableSource, precision_of: Callable[[str], str]
) -> Source:
    hashes, num_arrays = source.hashes
    _record(selection, list(source.arrays.values())[:num_arrays], hashes)
    arrays = {name: array.detach() for name, array in source.arrays.items()}
    if selection.row_ids is None:
        copies = {name: array.clone() for name, array in arrays.items()}
    elif selection.chosen is not None:
        copies = _copies_of_chosen(arrays, selection)
    else:
        device = selection.table.weight.device
        row_ids = torch.from_numpy(selection.row_ids).to(device, non_blocking=True)
        copies = {name: array.index_select(0, row_ids) for name, array in arrays.items()}
    of_copies = table_source(selection.table.name, copies, precision_of, is_packed=True)
    if selection.row_ids is None:
        return of_copies.range(0, selection.num_rows)
    return of_copies.rows(selection.row_ids)


def _record(selection: Selection, arrays: list[torch.Tensor], hashes: Any) -> None:
    if selection.row_ids is None:
        hashes.record_range(arrays, 0, selection.num_rows)
    elif selection.chosen is not None:
        hashes.record_chosen(arrays, selection.chosen)
    else:
        hashes.record(arrays, selection.row_ids)


def _copies_of_chosen(
    arrays: Mapping[str, torch.Tensor], selection: Selection
) -> dict[str, torch.Tensor]:
    """Copy rows whose ids the GPU still has: nothing is uploaded, in one launch per table."""
    copies = {
        name: array.new_empty((selection.num_rows, *array.shape[1:]))
        for name, array in arrays.items()
    }
    assert selection.chosen is not None
    native.gather_chosen(
        tables=list(arrays.values()), chosen=selection.chosen, outs=list(copies.values())
    )
    return copies
