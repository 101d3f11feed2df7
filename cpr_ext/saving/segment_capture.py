"""One segment on its way from the tables to a committed file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.saving.selection import RowIds, Selection, SnapshotKind
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.precision import EXACT, Precision
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.file_names import Kind, segment_name
from cpr_ext.storage.lineage import NO_ID
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.rounded_chunks import Rounding
from cpr_ext.storage.segment_format import (
    Chunk,
    Committed,
    SegmentLayout,
    TableSpec,
    array_specs,
    block_bytes_for,
    native_table,
    place_native,
)
from cpr_ext.storage.segment_header import record_of

#: What records hashes of rows, as the native pipeline takes it: see ``TableHashes``.
RecordedHashes = tuple[native.RowHashes | None, int, native.HostRowHashes | None]


@dataclass(frozen=True)
class Source:
    """What one table of a segment is captured from.

    Attributes:
        arrays: the memory to capture.
        live_arrays: returns the arrays that training uses now; None if nothing else has the memory.
        is_packed: the arrays are copies of the segment's rows alone, in their order.
        hashes: what records captured rows, as the native pipeline takes it.
    """

    spec: TableSpec
    arrays: Mapping[str, torch.Tensor]
    row_ids: RowIds | None = None
    live_arrays: Callable[[], Mapping[str, torch.Tensor]] | None = None
    is_packed: bool = False
    hashes: RecordedHashes = (None, 0, None)


@dataclass(frozen=True)
class WriteOptions:
    """How segments are written.

    Attributes:
        direct_io: past the page cache, where the file system allows it.
        refuse_nan: give a segment up rather than save NaN over good values.
        max_chunk_bytes: rows are captured in chunks of about this size; 0: as a slot holds.
        copy_on_write: rows may be given to ``copy_before_change``.
        precision: of the rows of tables.
    """

    direct_io: bool = True
    refuse_nan: bool = True
    max_chunk_bytes: int = 0
    copy_on_write: bool = False
    precision: Precision = field(default_factory=Precision)

    def precision_of(self, kind: SnapshotKind, array: str) -> str:
        """Return the precision of an array of a table in a snapshot of a kind."""
        return self.precision.of_weights(kind) if array == WEIGHT else self.precision.state


def dense_sources(part: DensePart) -> list[Source]:
    """Return the tensors of a dense part, element by element."""
    sources = []
    for name, tensor in part.tensors.items():
        flat = tensor.reshape(-1)
        spec = TableSpec(name, flat.numel(), 0, array_specs(name, {"": flat}), tuple(tensor.shape))
        sources.append(Source(spec, {"": flat}))
    return sources


def selection_source(
    selection: Selection,
    precision_of: Callable[[str], str] = lambda array: EXACT,
    hashes: RecordedHashes = (None, 0, None),
) -> Source:
    """Return the rows of a selection, with every per-row state of their table.

    Args:
        precision_of: of an array of the table, by its name.
        hashes: what records captured rows.
    """
    arrays = selection.table.arrays()
    begin = selection.begin if selection.row_ids is None else None
    specs = array_specs(selection.table.name, arrays, precision_of)
    spec = TableSpec(selection.table.name, selection.num_rows, begin, specs)
    return Source(spec, arrays, selection.row_ids, selection.table.arrays, hashes=hashes)


class SegmentCapture:
    """Captures a segment on the training thread; then commits it from any other.

    Args:
        captured: the native ``CapturedRows`` whose trackers forget rows as they are captured.

    Raises:
        UsageError: a row does not fit the staging slots, or a tensor cannot be stored.
    """

    def __init__(
        self,
        pipeline: native.SnapshotPipeline,
        manifest: Manifest,
        *,
        snapshot: int,
        kind: Kind,
        sources: Sequence[Source],
        metadata: dict[str, Any],
        options: WriteOptions,
        captured: native.CapturedRows | None = None,
    ) -> None:
        self._manifest = manifest
        self._path = manifest.directory / segment_name(snapshot, kind)
        self._sources: Sequence[Source] = sources
        specs = tuple(source.spec for source in sources)
        self._layout = SegmentLayout(
            specs, {"kind": kind, "snapshot": snapshot, **metadata}, block_bytes_for(specs)
        )
        tables = [
            native_table(
                self._layout,
                index,
                source.arrays,
                source.row_ids,
                is_packed=source.is_packed,
            )
            for index, source in enumerate(sources)
        ]
        self._layout.place(
            [
                table.rows_per_chunk(pipeline.slot_bytes, options.max_chunk_bytes)
                for table in tables
            ],
            [source.row_ids for source in sources],
        )
        for index, table in enumerate(tables):
            place_native(self._layout, index, table)
        self._steps: list[int] = []
        self._started: native.SegmentJob | None = pipeline.start(
            path=self._path,
            header_bytes=self._layout.header_bytes,
            file_bytes=self._layout.file_bytes,
            tables=tables,
            direct_io=options.direct_io,
            refuse_nan=options.refuse_nan,
            max_chunk_bytes=options.max_chunk_bytes,
            copy_on_write=options.copy_on_write,
            hashes=[source.hashes for source in sources],  # type: ignore[misc]  # some are None
            captured=captured,
        )

    @property
    def _job(self) -> native.SegmentJob:
        assert self._started is not None, "the segment is released"
        return self._started

    @property
    def file_bytes(self) -> int:
        """Size of the segment file."""
        return self._layout.file_bytes

    @property
    def is_capturing(self) -> bool:
        """True while rows remain to be captured."""
        return self._job is not None and bool(self._job.state == "capturing")

    def capture(
        self, step: int, *, max_bytes: int, wait_for_slot: bool, stop: native.StopFlag | None = None
    ) -> list[Chunk]:
        """Copy rows as they are now, at ``step``; see ``csrc/pipeline/segment_job.h``.

        Raises:
            SnapshotError: a table's memory was replaced since the snapshot began.
            CprError: what has stopped the writing meanwhile.
        """
        if any(_was_replaced(source) for source in self._sources):
            raise SnapshotError(
                "a table or its optimizer state was replaced while it was being saved (model.to(), "
                "load_state_dict() or a new parameter); call wait() before such a change"
            )
        captured = self._job.capture(
            step=step, max_bytes=max_bytes, wait_for_slot=wait_for_slot, stop=stop
        )
        chunks = [Chunk(*chunk) for chunk in captured]
        self._steps.extend(chunk.step for chunk in chunks)
        if self._job.state == "failed":
            self._job.wait("written")
        return chunks

    def copy_before_change(
        self, changing: Sequence[tuple[int, torch.Tensor]]
    ) -> list[tuple[int, torch.Tensor]]:
        """Copy those rows that wait to be captured, before they change.

        Args:
            changing: positions in ``sources``, each with row ids (n,) int64; those that the segment
                does not hold are passed over.

        Returns:
            What is left of them: some if the memory for it is full, which ``capture`` frees.
        """
        done = self._job.copy_before_write(changing)
        return [
            (table, row_ids[count:])
            for (table, row_ids), count in zip(changing, done, strict=True)
            if count < len(row_ids)
        ]

    def chunk_bytes(self, table: int, count: int) -> int:
        """Bytes that ``count`` rows of a table take in a slot."""
        return self._layout.rows_bytes(table, count)

    def cancel(self, reason: str) -> None:
        """Give the segment up; returns once its slots are free and its file is gone."""
        if self._started is None:
            return
        self._started.cancel(reason)
        with suppress(Exception):  # of a job given up, wait() raises what it was given up for
            self._started.wait("written")
        self._release()

    def finish(self, *, num_samples: int, is_complete: bool = False) -> SegmentRecord:
        """Wait until the rows are written, write the header, sync; what the manifest is to say."""
        self._job.wait("written")
        committed = Committed(
            *(min(self._steps), max(self._steps), num_samples, is_complete),
            chain_before=self._manifest.chain,
            merged_chain=NO_ID,
        )
        chunks = [Chunk(*chunk) for chunk in self._job.chunks()]
        if self._layout.is_rounded:
            self._layout.note_rounding(
                chunks,
                {
                    (table, first): Rounding(num_exact, error)
                    for table, first, num_exact, error in self._job.rounding()
                },
            )
        header = self._layout.header(chunks, committed)
        self._job.finish(header)
        layout = self._layout
        return record_of(self._path, layout.metadata, layout.file_bytes, header, committed)

    def mark_committed(self) -> None:
        """Record that the manifest names the segment."""
        self._job.mark_committed()
        self._release()

    def _release(self) -> None:
        """Let go of the memory that was captured: a user may keep the snapshot for long."""
        self._started = None
        self._sources = ()


def _was_replaced(source: Source) -> bool:
    """Return whether training now uses other memory than the captured one."""
    if source.live_arrays is None:
        return False
    live = source.live_arrays()
    return any(
        name not in live or live[name].data_ptr() != tensor.data_ptr()
        for name, tensor in source.arrays.items()
    )
