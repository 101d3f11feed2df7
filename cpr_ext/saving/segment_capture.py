"""One segment on its way from the tables to a committed file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cpr_ext._native import native
from cpr_ext.runtime.cuda import stager_of
from cpr_ext.saving.saved_hashes import RecordedHashes
from cpr_ext.saving.selection import RowIds, SnapshotKind
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.precision import EXACT, Precision
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.file_names import Kind, segment_name
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_format import described
from cpr_ext.storage.segment_header import record_of

#: Of all segments; 0: each has what its arrays ask for, see ``csrc/pipeline/segment_layout.h``.
BLOCK_BYTES = 0
#: A captured chunk: table, first row, number of rows, step; no checksums yet.
CapturedChunk = tuple[int, int, int, int, list[int]]

#: Address, shape, strides, dtype and device of a tensor.
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def place_of(tensor: torch.Tensor) -> Place:
    """Return what is equal while a tensor has the same memory, in the same form."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@dataclass(frozen=True)
class TableSource:
    """What segments capture the rows of one table from.

    Attributes:
        arrays: the memory to capture.
        table: the native description of it, for the header and the pipeline.
        places: where each array was when this was made, and in which form.
        row_bytes: bytes of a row, as training has it.
        hashes: what records captured rows, as the native pipeline takes it.
    """

    arrays: Mapping[str, torch.Tensor]
    table: native.SegmentTable
    places: Mapping[str, Place]
    row_bytes: int
    hashes: RecordedHashes = (None, 0)

    def rows(self, row_ids: RowIds) -> Source:
        """Return rows (n,) int64, ascending, for one segment."""
        return Source(self, self.table.with_row_ids(row_ids))

    def range(self, begin: int, num_rows: int) -> Source:
        """Return so many rows from ``begin`` on, for one segment."""
        return Source(self, self.table.with_range(begin, num_rows))

    def is_of(self, live: Mapping[str, torch.Tensor]) -> bool:
        """Return whether these arrays, which training uses now, are those, of the same form."""
        for name, place in self.places.items():
            if name not in live or place_of(live[name]) != place:
                return False
        return True


class Source(NamedTuple):
    """The rows of a table that one segment captures, as the native pipeline takes them."""

    of: TableSource
    table: native.SegmentTable


@dataclass(frozen=True)
class WriteOptions:
    """How segments are written.

    Attributes:
        direct_io: past the page cache, where the file system allows it.
        refuse_nan: give a segment up rather than save NaN over good values.
        max_chunk_bytes: rows are captured in chunks of about this size; 0: as a slot holds.
        precision: of the rows of tables.
    """

    direct_io: bool = True
    refuse_nan: bool = True
    max_chunk_bytes: int = 0
    precision: Precision = field(default_factory=Precision)

    def precision_of(self, kind: SnapshotKind, array: str) -> str:
        """Return the precision of an array of a table in a snapshot of a kind."""
        return self.precision.of_weights(kind) if array == WEIGHT else self.precision.state


def table_source(
    name: str,
    arrays: Mapping[str, torch.Tensor],
    precision_of: Callable[[str], str] = lambda array: EXACT,
    *,
    shape: Sequence[int] | None = None,
    is_packed: bool = False,
    hashes: RecordedHashes = (None, 0),
) -> TableSource:
    """Return what segments capture a table from: its arrays, each (num_rows, ...).

    Args:
        precision_of: of an array of the table, by its name.
        shape: of a tensor that is no table; its one array, without a name, is flat.
        is_packed: the arrays are copies of the rows of one segment alone, in their order.

    Raises:
        UsageError: a tensor cannot be stored.
    """
    texts = described(name, arrays, precision_of)
    table = native.SegmentTable(name=name, num_rows=0, is_packed=is_packed)
    for spec in texts.specs:
        tensor = arrays[spec.name]
        stager = stager_of(tensor)
        table.add_rows(spec.name, tensor, 0, stager=stager, precision=spec.precision)
    table.describe(
        name=texts.name,
        arrays=texts.arrays,
        stored=texts.stored,
        shape=None if shape is None else ",".join(map(str, shape)),
    )
    places = {name: place_of(tensor) for name, tensor in arrays.items()}
    row_bytes = sum(array.nbytes // max(1, len(array)) for array in arrays.values())
    return TableSource(arrays, table, places, row_bytes, hashes)


def dense_sources(part: DensePart) -> list[Source]:
    """Return the tensors of a dense part, element by element."""
    sources = []
    for name, tensor in part.tensors.items():
        flat = tensor.reshape(-1)
        source = table_source(name, {"": flat}, shape=tensor.shape)
        sources.append(source.range(0, flat.numel()))
    return sources


class SegmentCapture:
    """Captures a segment on the training thread; then finishes it from any other.

    Attributes:
        file: its name.

    Args:
        directory: of the segments.
        captured: the native ``CapturedRows`` whose trackers forget rows as they are captured.

    Raises:
        UsageError: a row does not fit the staging slots, or a tensor cannot be stored.
    """

    def __init__(
        self,
        pipeline: native.SnapshotPipeline,
        directory: Path,
        *,
        snapshot: int,
        snapshot_id: str,
        kind: Kind,
        sources: Sequence[Source],
        metadata: Mapping[str, Any],
        options: WriteOptions,
        captured: native.CapturedRows | None = None,
    ) -> None:
        self.file = segment_name(snapshot, kind)
        self._identity = {"kind": kind, "snapshot": snapshot, "id": snapshot_id}
        tables = [source.table for source in sources]
        self._layout = native.SegmentLayout(
            tables=tables,
            metadata=json.dumps({**self._identity, **metadata}, separators=(",", ":")),
            slot_bytes=pipeline.slot_bytes,
            max_chunk_bytes=options.max_chunk_bytes,
            block_bytes=BLOCK_BYTES,
        )
        self._steps: tuple[int, int] | None = None  # the first and the last
        self._started: native.SegmentJob | None = pipeline.start(
            path=directory / self.file,
            header_bytes=self._layout.header_bytes,
            file_bytes=self._layout.file_bytes,
            tables=tables,
            direct_io=options.direct_io,
            refuse_nan=options.refuse_nan,
            max_chunk_bytes=options.max_chunk_bytes,
            hashes=[source.of.hashes for source in sources],  # type: ignore[misc]  # some are None
            captured=captured,
        )

    @property
    def _job(self) -> native.SegmentJob:
        assert self._started is not None, "the segment is released"
        return self._started

    @property
    def is_capturing(self) -> bool:
        """True while rows remain to be captured."""
        return self._job is not None and bool(self._job.state == "capturing")

    def capture(
        self, step: int, *, max_bytes: int, wait_for_slot: bool, stop: native.StopFlag | None = None
    ) -> list[CapturedChunk]:
        """Copy rows as they are now, at ``step``; see ``csrc/pipeline/segment_job.h``.

        Raises:
            CprError: what has stopped the writing meanwhile.
        """
        chunks = self._job.capture(
            step=step, max_bytes=max_bytes, wait_for_slot=wait_for_slot, stop=stop
        )
        if chunks:
            self._steps = (step, step) if self._steps is None else (self._steps[0], step)
        if self._job.state == "failed":
            self._job.wait("written")
        return chunks

    @property
    def captured_bytes(self) -> int:
        """What the rows captured so far take in slots."""
        return int(self._job.captured_bytes)

    def cancel(self, reason: str, *, keeps_file: bool = False) -> None:
        """Give the segment up; returns once its slots are free and its file is gone.

        Args:
            keeps_file: of a finished segment, the file stays.
        """
        if self._started is None:
            return
        if keeps_file:
            self.keep_file()
            return
        self._started.cancel(reason)
        with suppress(Exception):  # of a job given up, wait() raises what it was given up for
            self._started.wait("written")
        self._release()

    def finish(self, *, num_samples: int, is_complete: bool = False) -> SegmentRecord:
        """Wait until the rows are written, write the header, sync; what the manifest is to say."""
        self._job.wait("written")
        header = self._job.header(self._layout)
        self._job.finish(header)
        assert self._steps is not None, "a segment without rows"
        return record_of(
            self._identity,
            self._layout.file_bytes,
            header,
            steps=self._steps,
            num_samples=num_samples,
            is_complete=is_complete,
        )

    def keep_file(self) -> None:
        """Let the file stay: the manifest names it."""
        self._job.mark_committed()
        self._release()

    def _release(self) -> None:
        """Let go of the memory that was captured: a user may keep the snapshot for long."""
        self._started = None
