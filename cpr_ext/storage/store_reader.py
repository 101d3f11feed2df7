"""A read-only view of a store: no locks, no model. What every tool looks through.

A training process may commit while one reads. A view is taken at one moment: the manifests are read
until two readings of ``dense/MANIFEST.json`` agree, so it never mixes two snapshots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from cpr_ext.errors import DamageError, StorageError, StoreError, UsageError
from cpr_ext.state.dtypes import DTYPES
from cpr_ext.state.slot_keys import KEY, is_key_array
from cpr_ext.state.table import shard_row_range
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.checksummed_json import read_checksummed
from cpr_ext.storage.file_names import DENSE_DIRECTORY, STORE_FILE, parse_shard_name, shard_name
from cpr_ext.storage.leases import reader_lease
from cpr_ext.storage.lineage import is_id
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retries import exists, list_directory
from cpr_ext.storage.segment_format import Segment
from cpr_ext.storage.segment_header import read_segment
from cpr_ext.storage.stale_manifests import is_torn, refuse_other_states

# Between readings of a store that changes while it is read.
_PAUSES_SECONDS = (*(0.0,) * 5, *(0.01,) * 10, *(0.1,) * 10)
_MAX_ROWS = 2**48
T = TypeVar("T")


@dataclass(frozen=True)
class StoredTable:
    """What STORE.json says of a table: weight (num_embeddings, embedding_dim) of ``dtype``.

    ``part`` is what of a larger table it is, if other stores hold the rest. ``keys`` are the
    arrays that say which id each row belongs to; none: row i belongs to id i.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    part: TablePart | None = None
    keys: tuple[str, ...] = ()


class StoreReader:
    """The identity and the manifests of a store.

    Attributes:
        directory: the store.
        store_id: its identity.
        num_shards: into how many row ranges its tables are cut.
        tables: the tables by name.
        dense: manifest of the dense part; its last segment is the newest snapshot.
        shards: manifest of each shard.

    Raises:
        StoreError: the directory is not a store, or of a format version not known here.
        DamageError: STORE.json or a manifest is not what was committed.
        StorageError: the operating system refused to read.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        identity = read_identity(self.directory)
        self.store_id, self.num_shards, self.tables = identity
        self.refresh()

    def refresh(self) -> None:
        """Look again: take the view that is newest now.

        Raises:
            DamageError: a manifest is not what was committed, is older than another has seen, or
                lacks the state of a snapshot.
        """
        require_shards(self.directory, self.num_shards)
        dense = self.directory / DENSE_DIRECTORY
        for pause in _PAUSES_SECONDS:
            self.dense = Manifest(dense, store_id=self.store_id)
            self.shards = [
                Manifest(self.shard_directory(shard), store_id=self.store_id)
                for shard in range(self.num_shards)
            ]
            is_steady = _state(Manifest(dense, store_id=self.store_id)) == _state(self.dense)
            if is_steady and not is_torn([self.dense, *self.shards]):
                refuse_other_states(self.dense, self.shards)
                return
            time.sleep(pause)
        raise self.unsteady()

    def unsteady(self) -> StoreError:
        """Return what to raise if no view of the store holds for long enough."""
        return StoreError(
            f"'{self.directory}' changed during each of {len(_PAUSES_SECONDS)} readings; pause its "
            "training"
        )

    def is_gone(self) -> bool:
        """Return whether another process has replaced this view, and removed a file of it."""
        manifests = [self.dense, *self.shards]
        now = (Manifest(m.directory, store_id=self.store_id) for m in manifests)
        if all(_state(new) == _state(m) for new, m in zip(now, manifests, strict=True)):
            return False
        return any(
            not exists(manifest.path_of(record))
            for manifest in manifests
            for record in manifest.segments
        )

    def shard_directory(self, shard: int) -> Path:
        """Return the directory of a shard."""
        return self.directory / shard_name(shard)

    def row_range(self, table: str, shard: int) -> tuple[int, int]:
        """Return rows [begin, end) of a table that a shard holds; may be empty."""
        return shard_row_range(self.table(table).num_embeddings, shard, self.num_shards)

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
        """Read the dense part of the newest snapshot; ``full``: of the newest recovery point.

        Raises:
            StoreError: there is none.
        """
        records = [record for record in self.dense.segments if record.is_complete or not full]
        if not records:
            what = "full-recovery point" if full else "snapshot that was committed as a whole"
            raise StoreError(f"'{self.directory}' holds no {what}")
        return records[-1]

    def live(self, shard: int, snapshot: int) -> list[SegmentRecord]:
        """Return the segments of a shard that make its state at ``snapshot``, oldest first.

        They begin with the newest base; what is older than that can only serve as a fallback.
        """
        records = [r for r in self.shards[shard].segments if r.snapshot <= snapshot]
        bases = [index for index, record in enumerate(records) if record.kind == "base"]
        return records[bases[-1] :] if bases else records

    def open_live(self, shard: int, snapshot: int) -> list[Segment]:
        """Return the same, opened: headers read and checked.

        Raises:
            DamageError: one is missing or damaged, or none of them is a base though the shard has
                rows.
        """
        manifest, records = self.shards[shard], self.live(shard, snapshot)
        has_rows = any(b < e for b, e in (self.row_range(name, shard) for name in self.tables))
        if has_rows and not (records and records[0].kind == "base"):
            raise DamageError(
                f"{manifest.directory}: no base segment of snapshot {snapshot} or before"
            )
        opened = [open_segment(manifest, record) for record in records]
        if has_rows:
            # Whoever reads reserves memory for all rows of the shard; here are as many on disk.
            require_all_rows(opened[0], {n: self.row_range(n, shard) for n in self.tables})
        return opened


def _state(manifest: Manifest) -> tuple[str, tuple[SegmentRecord, ...]]:
    return manifest.commit_id, manifest.segments


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


def open_segment(manifest: Manifest, record: SegmentRecord) -> Segment:
    """Read and check the header of a segment that a manifest names.

    Raises:
        DamageError: it is missing or damaged, or it is another segment than the manifest says.
    """
    segment = read_segment(
        manifest.path_of(record),
        header_bytes=record.header_bytes,
        header_crc32c=record.header_crc32c,
    )
    if segment.layout.file_bytes != record.file_bytes:
        raise DamageError(
            f"{segment.path}: {segment.layout.file_bytes} bytes, the manifest recorded "
            f"{record.file_bytes}"
        )
    said = tuple(segment.metadata.get(name) for name in ("kind", "snapshot", "shard"))
    shard = parse_shard_name(manifest.directory.name)
    expected = (record.kind, record.snapshot, said[2] if shard is None else shard)
    is_dense = record.kind == "dense"
    if said != expected or any((t.shape is not None) != is_dense for t in segment.layout.tables):
        raise DamageError(
            f"{segment.path}: it says it is {said} (kind, snapshot, shard); its place is that of "
            f"{expected}"
        )
    return segment


def require_shards(directory: Path, num_shards: int) -> None:
    """Raise DamageError if a shard's directory is missing; counts no further than there are some.

    ``num_shards`` is what a file says, and may be any number.
    """
    names = {entry.name for entry in list_directory(directory)}
    missing = next((n for n in range(num_shards) if shard_name(n) not in names), None)
    if missing is not None:
        raise DamageError(
            f"{directory / STORE_FILE} records {num_shards} shards, but {shard_name(missing)} is "
            "missing. If the creation of the store was interrupted, open it for training again; "
            "else put the directory back"
        )


def require_all_rows(base: Segment, row_ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise DamageError unless a base segment holds every row [begin, end) of these tables."""
    held = {spec.name: (spec.range_begin, spec.num_rows) for spec in base.layout.tables}
    for name, (begin, end) in row_ranges.items():
        if begin < end and held.get(name) != (begin, end - begin):
            raise DamageError(f"{base.path}: this base lacks rows of table '{name}'")


class StoreIdentity(NamedTuple):
    """What STORE.json says: the store's identity, its number of shards, and its tables by name."""

    store_id: str
    num_shards: int
    tables: Mapping[str, StoredTable]


def read_identity(directory: Path, file: str = STORE_FILE) -> StoreIdentity:
    """Return what a store is, from its STORE.json, or the copy of it.

    Raises:
        StoreError: there is none, or it has a version not known here.
        DamageError: it is not what was written.
    """
    path = directory / file
    content = read_checksummed(path, "cpr_ext.store")
    if content is None:
        raise StoreError(
            f"'{directory}' is not a cpr_ext store (it has no {file}); name the directory that a "
            "Checkpointer writes"
        )
    try:
        store_id, num_shards = content["store_id"], _count(content["num_shards"])
        if not is_id(store_id):
            raise ValueError(f"{store_id!r:.100} is no identity")
        tables = {str(name): _stored(str(name), t) for name, t in content["tables"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"{path}: lacks what a store needs ({error!r})") from error
    return StoreIdentity(store_id, num_shards, tables)


def _stored(name: str, table: Any) -> StoredTable:
    shape = (_count(table["num_embeddings"]), _count(table["embedding_dim"]))
    part = TablePart.from_json(table["part"]) if "part" in table else None
    if part is not None and part.shape != shape:
        raise ValueError(f"table {name!r:.100} of shape {shape} is a part of shape {part.shape}")
    keys = tuple(map(str, table.get("keys", ())))
    if keys and (KEY not in keys or not all(map(is_key_array, keys))):
        raise ValueError(f"table {name!r:.100} has keys {keys!r:.100}")
    return StoredTable(name, *shape, DTYPES[table["dtype"]], part, keys)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_ROWS:
        raise ValueError(f"{value!r} is not a count")
    return value
