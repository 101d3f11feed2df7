"""A read-only view of a store: no lock, no live model. What every reader looks through.

A training process may commit while one reads. A view is of one manifest, so it never mixes two
snapshots. It parses each segment's header once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from cpr_ext.errors import DamageError, StorageError, StoreError, UsageError
from cpr_ext.storage.file_names import MANIFEST_FILE, SEGMENTS_DIRECTORY, is_store
from cpr_ext.storage.filesystem import require_directory
from cpr_ext.storage.locks import reader_lease
from cpr_ext.storage.manifest import Manifest, SegmentRecord, StoredTable, read_manifest
from cpr_ext.storage.retries import exists, list_directory, retrying
from cpr_ext.storage.segment_format import ArraySpec, Segment, in_memory
from cpr_ext.storage.segment_header import read_segment
from cpr_ext.storage.segment_reader import SegmentRows

# Between readings of a store whose files are removed while it is read.
_PAUSES_SECONDS = (*(0.0,) * 5, *(0.01,) * 10, *(0.1,) * 10)
T = TypeVar("T")


class StoreReader:
    """One committed state of a store.

    Attributes:
        directory: the store.
        manifest: what is committed.

    Args:
        manifest: None: the one that is there now.

    Raises:
        StoreError: the directory is not a store, or of a format version not known here.
        DamageError: the manifest is not what was committed.
        StorageError: the operating system refused to read.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.directory = Path(directory)
        self.manifest = self._read() if manifest is None else manifest
        self._has_segments = False
        self._opened: dict[SegmentRecord, Segment | DamageError] = {}
        self._rows: dict[int, list[SegmentRows]] = {}

    def _read(self) -> Manifest:
        if (manifest := read_manifest(self.directory)) is not None:
            return manifest
        if is_store(path.name for path in list_directory(self.directory)):
            raise DamageError(
                f"{self.directory / MANIFEST_FILE} is missing. If the creation of the store was "
                "interrupted, open it for training again; else `cpr repair` shows what can be "
                "rebuilt"
            )
        raise StoreError(
            f"'{self.directory}' is not a cpr_ext store (it has no {MANIFEST_FILE}); name the "
            "directory that a Checkpointer writes"
        )

    @property
    def store_id(self) -> str:
        """Identity of the store."""
        return self.manifest.store_id

    @property
    def tables(self) -> Mapping[str, StoredTable]:
        """The tables by name."""
        return self.manifest.model.tables

    def unsteady(self) -> StoreError:
        """Return what to raise if no view of the store holds for long enough."""
        return StoreError(
            f"'{self.directory}' changed during each of {len(_PAUSES_SECONDS)} readings; pause its "
            "training"
        )

    def is_gone(self) -> bool:
        """Return whether another process has replaced this view, and removed a file of it."""
        now = read_manifest(self.directory)
        if now is not None and now.commit_id == self.manifest.commit_id:
            return False
        return any(not exists(self.path_of(record)) for record in self.manifest.records())

    def path_of(self, record: SegmentRecord) -> Path:
        """Return the file of a segment."""
        return self.directory / SEGMENTS_DIRECTORY / record.file

    def table(self, name: str) -> StoredTable:
        """Return the table of a name.

        Raises:
            UsageError: there is none; the message lists those that are.
        """
        if name not in self.tables:
            raise UsageError(
                f"'{self.directory}' has no table '{name}'; it has: "
                f"{', '.join(sorted(self.tables))}"
            )
        return self.tables[name]

    def newest(self, *, full: bool = False) -> SegmentRecord:
        """Return the dense part of the newest snapshot; ``full``: of the newest recovery point.

        Raises:
            StoreError: there is none.
        """
        records = [record for record in self.manifest.dense if record.is_complete or not full]
        if not records:
            what = "full-recovery point" if full else "snapshot"
            raise StoreError(f"'{self.directory}' holds no {what}")
        return records[-1]

    def open(self, record: SegmentRecord) -> Segment:
        """Return a segment; its header is read and checked once.

        Raises:
            DamageError: it is missing or damaged, or it is another segment than the manifest says.
            StorageError: it could not be read.
        """
        if (known := self._opened.get(record)) is None:
            try:
                self._require_segments()
                known = read_segment(self.path_of(record), record)
            except DamageError as error:
                known = error
            self._opened[record] = known
        if isinstance(known, DamageError):
            raise known.with_traceback(None)
        return known

    def _require_segments(self) -> None:
        """Raise DamageError unless segments are in a real directory; looked at once."""
        if not self._has_segments:
            directory = self.directory / SEGMENTS_DIRECTORY
            try:
                retrying(directory, lambda: require_directory(directory))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise DamageError(f"{directory}: {error.strerror or error}") from error
            self._has_segments = True

    def open_at(self, snapshot: int) -> list[Segment]:
        """Return the segments that make the rows' state at ``snapshot``, oldest first, opened.

        Raises:
            DamageError: one is missing or damaged, or its base lacks rows.
        """
        opened = [self.open(record) for record in self.manifest.at(snapshot)]
        if opened:
            # Who reads reserves memory for all rows; here are as many on disk.
            require_all_rows(opened[0], self.manifest.model.row_ranges)
        return opened

    def rows_at(self, snapshot: int) -> list[SegmentRows]:
        """Return what reads the rows of :meth:`open_at`; made once.

        Raises:
            DamageError: a segment is missing or damaged, or holds rows of other tables.
        """
        if (known := self._rows.get(snapshot)) is None:
            ranges = self.manifest.model.row_ranges
            known = self._rows[snapshot] = [SegmentRows(s, ranges) for s in self.open_at(snapshot)]
        return known


def read_committed(store: str | os.PathLike[str], read: Callable[[StoreReader], T]) -> T:
    """Call ``read`` with a view of a store, which a training process may be changing.

    Returns:
        What ``read`` made of one committed state: if files of the view are removed meanwhile, it
        is called again with the view that is newest then.

    Raises:
        StoreError: each of many views was gone before it was read.
    """
    return read_committed_all([store], lambda readers: read(readers[0]))


def read_committed_all(
    stores: Sequence[str | os.PathLike[str]],
    read: Callable[[list[StoreReader]], T],
    is_whole: Callable[[T], bool] = lambda result: True,
) -> T:
    """Return the same of several stores.

    Args:
        is_whole: False for a result in which something was passed over as damaged: it is kept only
            if all files are still there.
    """
    with ExitStack() as leased:
        for store in stores:
            leased.enter_context(reader_lease(Path(store)))
        for pause in _PAUSES_SECONDS:
            readers = [StoreReader(store) for store in stores]
            try:
                result = read(readers)
                if is_whole(result) or not any(reader.is_gone() for reader in readers):
                    return result
            except (DamageError, StorageError):
                if not any(reader.is_gone() for reader in readers):
                    raise
            time.sleep(pause)
        raise readers[0].unsteady()


def require_all_rows(base: Segment, row_ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise DamageError unless a base segment holds every row [begin, end) of these tables."""
    held = {spec.name: (spec.range_begin, spec.num_rows) for spec in base.layout.tables}
    for name, (begin, end) in row_ranges.items():
        if begin < end and held.get(name) != (begin, end - begin):
            raise DamageError(f"{base.path}: this base lacks rows of table '{name}'")


@dataclass(frozen=True)
class Rows:
    """Rows of one table.

    Attributes:
        row_ids: (n,) int64.
        arrays: ``weight`` (n, embedding_dim) and each per-row optimizer state (n, ...).
        steps: (n,) int64, the step at which each row was captured; in a segment that a repair
            wrote, perhaps a later one. -1: no segment holds it.
    """

    row_ids: torch.Tensor
    arrays: dict[str, torch.Tensor]
    steps: torch.Tensor


# (segment file, chunk, rows in it, error): what is damaged, and passed over.
DamageHandler = Callable[[Path, int, int, DamageError], None]


class NewestRows:
    """The rows of ``table`` in the given segments; where they overlap the last one wins.

    With ``on_damage``, damaged chunks are reported to it and rows fall back to older segments;
    without it, they raise.

    Raises:
        DamageError: the segments do not agree on an array's dtype or row shape.
    """

    def __init__(
        self,
        table: str,
        segments: Sequence[SegmentRows],
        *,
        on_damage: DamageHandler | None = None,
    ) -> None:
        self.table = table
        self._on_damage = on_damage
        self.segments = [segment for segment in segments if segment.chunks_of(table)]
        found: dict[str, ArraySpec] = {}
        for segment in self.segments:
            spec = segment.table(table)
            assert spec is not None
            for array in spec.arrays:
                if not found.setdefault(array.name, in_memory(array)).is_like(array):
                    raise DamageError(
                        f"{segment.segment.path}: '{table}/{array.name}' is {array.dtype} with "
                        f"rows of shape {array.row_shape}, in an older segment it is not"
                    )
        self.arrays: tuple[ArraySpec, ...] = tuple(found.values())

    def range(self, begin: int, end: int) -> Rows:
        """Read rows [begin, end), with memory for them and one chunk.

        Raises:
            DamageError: a chunk that overlaps them is damaged.
        """
        return self._newest(torch.arange(begin, end))

    def chosen(self, row_ids: torch.Tensor) -> Rows:
        """Read rows ``row_ids`` (n,) int64, ascending and unique; reads only their chunks.

        Raises:
            DamageError: a chunk that holds one of them is damaged.
        """
        return self._newest(row_ids)

    def _newest(self, row_ids: torch.Tensor) -> Rows:
        count = len(row_ids)
        # An optimizer's state that was made after a segment was captured is zero in it.
        arrays = {
            array.name: torch.zeros((count, *array.row_shape), dtype=array.dtype)
            for array in self.arrays
        }
        steps = torch.full((count,), -1, dtype=torch.int64)
        missing = torch.ones(count, dtype=torch.bool)
        for segment in reversed(self.segments):
            for chunk in segment.chunks_of(self.table):
                if not missing.any():
                    break
                try:
                    at = segment.positions(chunk, row_ids)
                    if at is None:
                        continue
                    rows = segment.rows(chunk)
                except DamageError as error:
                    if self._on_damage is None:
                        raise
                    held = segment.segment.chunks[chunk].num_rows
                    self._on_damage(segment.segment.path, chunk, held, error)
                    continue
                where, hit = at
                hit &= missing[where]
                where, source = where[hit], torch.searchsorted(rows.row_ids, row_ids[where[hit]])
                for name, values in rows.arrays.items():
                    arrays[name][where] = values[source]
                steps[where] = rows.step
                missing[where] = False
        return Rows(row_ids, arrays, steps)
