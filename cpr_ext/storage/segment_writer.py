"""Write a segment from rows that arrive chunk by chunk, without a table in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import gcd
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.storage.file_names import Kind, segment_name
from cpr_ext.storage.filesystem import create_anew, remove_opened, storage_error
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.rounded_chunks import RoundedRows, Rounding
from cpr_ext.storage.segment_format import (
    ALIGNMENT,
    Chunk,
    Committed,
    SegmentLayout,
    TableSpec,
    align_up,
    block_bytes_for,
)
from cpr_ext.storage.segment_header import record_of


class Pace:
    """Holds a copying loop to a number of bytes per second, and stops it when asked to.

    Args:
        bytes_per_second: None: as fast as it goes.
        is_stopped: called periodically; True ends the work with SnapshotError.
    """

    def __init__(
        self,
        bytes_per_second: float | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rate = bytes_per_second
        self._is_stopped = is_stopped
        self._started = time.monotonic()
        self._bytes = 0

    def spend(self, size_bytes: int) -> None:
        """Account for bytes read or written; sleeps for as long as they are ahead of the limit.

        Raises:
            SnapshotError: the work is to stop.
        """
        self._bytes += size_bytes
        while True:
            if self._is_stopped():
                raise SnapshotError("it was stopped")
            ahead = 0.0
            if self._rate is not None:
                ahead = self._started + self._bytes / self._rate - time.monotonic()
            if ahead <= 0:
                return
            time.sleep(min(ahead, 0.05))


def rows_per_chunk(table: TableSpec, chunk_bytes: int) -> int:
    """About ``chunk_bytes`` worth of rows, such that every chunk starts on a block in every array.

    The same rule as ``rows_per_chunk`` in ``csrc/pipeline/segment_plan.h``, but never none.
    """
    sizes = [array.file_row_bytes for array in table.arrays]
    if table.range_begin is None:
        sizes.append(torch.int64.itemsize)
    unit = max(ALIGNMENT // gcd(ALIGNMENT, size) for size in sizes)
    return max(1, chunk_bytes // (unit * sum(sizes))) * unit


class SegmentStream:
    """A segment being written next to the live ones; nothing names it until a manifest does.

    Used as a context manager: a file that was not finished is removed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        snapshot: int,
        kind: Kind,
        tables: tuple[TableSpec, ...],
        metadata: Mapping[str, Any],
        chunk_bytes: int,
        pace: Pace,
        row_ids: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.path = directory / segment_name(snapshot, kind)
        self._layout = SegmentLayout(
            tables,
            {"kind": kind, "snapshot": snapshot, **metadata},
            block_bytes_for(tables),
        )
        self.rows_per_chunk = [rows_per_chunk(table, chunk_bytes) for table in tables]
        self._layout.place(
            self.rows_per_chunk, [None if ids is None else ids.numpy() for ids in row_ids]
        )
        self._rounding: dict[tuple[int, int], Rounding] = {}
        self._end = self._layout.file_bytes
        self._chunks: list[Chunk] = []
        self._pace = pace
        self._is_finished = False
        try:
            self._file = create_anew(self.path)
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    @property
    def file_bytes(self) -> int:
        """Size the file will have."""
        return self._layout.file_bytes

    def write(
        self,
        table: int,
        first: int,
        step: int,
        row_ids: torch.Tensor,
        arrays: Mapping[str, torch.Tensor],
        exact: tuple[torch.Tensor, Mapping[str, torch.Tensor]] | None = None,
        largest_error: float = 0.0,
    ) -> None:
        """Write one chunk: the rows at position ``first`` of table ``table`` of the layout.

        Args:
            arrays: of rounded arrays as in the file: (n, file_row_bytes) uint8.
            exact: of rounded arrays, the positions of rows that are exact, and their values.
            largest_error: of rounded values.

        Raises:
            StorageError: the operating system refused.
        """
        spec, layout = self._layout.tables[table], self._layout
        pieces: list[tuple[torch.Tensor, int]] = []
        if spec.range_begin is None:
            is_packed = table in layout.id_runs
            ids = torch.from_numpy(native.pack_row_ids(row_ids)) if is_packed else row_ids
            pieces.append((ids, layout.row_ids_offset(table, first)))
        for array in spec.arrays:
            offset = layout.offset(table, array.name) + first * array.file_row_bytes
            pieces.append((arrays[array.name], offset))
        if spec.exact_row_bytes:
            num_exact = 0 if exact is None else len(exact[0])
            self._rounding[table, first] = Rounding(num_exact, largest_error)
            if exact is not None and num_exact:
                values = [exact[1][array.name] for array in spec.arrays if array.is_rounded]
                parts = [exact[0].to(torch.int32), *values]
                data = torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])
                pieces.append((data, self._end))
                self._end += align_up(len(data), layout.block_bytes)
        checksums = []
        for tensor, offset in pieces:
            piece = _padded_bytes(tensor, layout.block_bytes)
            checksums.append(int(native.crc32c(piece)))
            self._write_at(piece, offset)
            self._pace.spend(len(piece))
        self._chunks.append(Chunk(table, first, len(row_ids), step, checksums))

    def finish(self, committed: Committed, *, rounded: RoundedRows) -> SegmentRecord:
        """Write the header and sync the file; what a manifest is to say of it.

        Args:
            rounded: how many rows were rounded before; not more than ``metadata`` noted.
        """
        self._layout.metadata.pop("rounded", None)
        self._layout.metadata.update(rounded.to_note())
        self._layout.note_rounding(self._chunks, self._rounding)
        header = self._layout.header(self._chunks, committed)
        self._write_at(memoryview(header), 0)
        try:
            os.fsync(self._file)
        except OSError as error:
            raise storage_error("sync", self.path, error) from error
        self._is_finished = True
        layout = self._layout
        return record_of(self.path, layout.metadata, layout.file_bytes, header, committed)

    def _write_at(self, data: memoryview, offset: int) -> None:
        try:
            while data:
                written = os.pwrite(self._file, data, offset)
                data, offset = data[written:], offset + written
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def __enter__(self) -> SegmentStream:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_finished:
            # The rows are on disk; the page cache is for training.
            with suppress(OSError):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            with suppress(OSError):
                remove_opened(self.path, self._file)
        os.close(self._file)


def _padded_bytes(values: torch.Tensor, block_bytes: int) -> memoryview:
    """Return the rows' bytes, zeros after them up to a whole number of blocks."""
    size_bytes = values.numel() * values.element_size()
    padded = torch.zeros(align_up(size_bytes, block_bytes), dtype=torch.uint8)
    padded[:size_bytes] = values.contiguous().reshape(-1).view(torch.uint8)
    return padded.numpy().data
