"""The store directory of one training job, opened for writing.

::

    LOCK                                      whose holder writes here; taken first
    STORE.json                                which model this is
    STORE.copy.json                           a copy of it, for ``cpr repair``
    dense/MANIFEST.json                       snapshots of all that is not a table row
    dense/00000012-dense.safetensors
    shard-00003/MANIFEST.json                 live segments of one shard, oldest first
    shard-00003/00000012-partial.safetensors

A shard commits on its own. The dense part of a snapshot commits after the shards of its process, so
a snapshot that ``dense/MANIFEST.json`` names is committed as a whole.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.state.position import MAX_WRITABLE
from cpr_ext.state.table import Table
from cpr_ext.storage.checksummed_json import (
    FREE_BYTES,
    REPAIR_HINT,
    read_checksummed,
    write_checksummed,
)
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    FETCHING_FILE,
    STORE_COPY_FILE,
    STORE_FILE,
    names_in_the_way,
    shard_name,
)
from cpr_ext.storage.filesystem import (
    make_directory,
    require_directory,
    storage_error,
    sync_directory,
)
from cpr_ext.storage.lineage import is_id, new_id
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retention import Retention, keep_points, plan_retention
from cpr_ext.storage.retries import exists, list_directory
from cpr_ext.storage.stale_manifests import refuse_other_states, refuse_outdated

logger = logger_of("saving")


class Store:
    """The manifests of a store and the right to change them.

    The right ends with :meth:`close`, with the last reference to this object, and with the process;
    a forked child does not have it. A directory that is moved or replaced is noticed before each
    commit, and after it.

    Args:
        directory: the store; made if it does not exist. A relative path is one of the working
            directory at this moment.
        tables: the tables of the model; a store of other tables is refused.
        num_shards: into how many row ranges each table is cut.
        retention: how much history to keep.

    Raises:
        StoreError: the directory is not a store, holds another model or another number of shards,
            or is in use; names the process.
        DamageError: a file is not what was committed, or a manifest is older than another has seen.
        StorageError: the directory cannot be made, read or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tables: Sequence[Table],
        num_shards: int,
        retention: Retention | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.num_shards = num_shards
        self.retention = retention or Retention()
        self._locks: list[DirectoryLock] = []
        self._opened: list[Manifest] = []
        #: Content of STORE.json.
        self.description: dict[str, Any] = {}
        self._passed_over: frozenset[SegmentRecord] = frozenset()
        try:
            self.directory = self.directory.absolute()
            make_directory(self.directory)
            self._refuse_strangers()  # before anything is made here
            self._lock(self.directory)
            self._identify(describe_model(tables, num_shards))
            self.dense = self._open_manifest(self.directory / DENSE_DIRECTORY)
            self.shards = [
                self._open_manifest(self.directory / shard_name(shard))
                for shard in range(num_shards)
            ]
            self._make_sound()
        except BaseException as error:
            with suppress(StorageError):
                self.close()
            if isinstance(error, OSError):
                raise self._not_opened(error) from error
            raise

    def _refuse_strangers(self) -> None:
        """Raise StoreError if this is no store, and no empty directory either."""
        names = [path.name for path in list_directory(self.directory)]
        strangers = names_in_the_way(names)
        # Asked second: what another process makes here comes after its STORE.json.
        if exists(self.directory / STORE_FILE):
            return
        if FETCHING_FILE in names:
            raise StoreError(
                f"'{self.directory}' was being filled from a copy in object storage, which was "
                "cut off. Open it with that copy (remote=), or choose another directory"
            )
        if strangers:
            raise StoreError(
                f"'{self.directory}' is not a cpr_ext store (it has no {STORE_FILE}) but holds "
                f"{strangers[0]!r}; choose an empty or a new directory"
                + (REPAIR_HINT if STORE_COPY_FILE in strangers else "")
            )

    def _lock(self, directory: Path) -> DirectoryLock:
        lock = DirectoryLock(directory, may_be_link=directory == self.directory)
        self._locks.append(lock)
        return lock

    def _identify(self, model: dict[str, Any]) -> None:
        path = self.directory / STORE_FILE
        # As large as that of the live model it may be, before anything is saved.
        free_bytes = max(FREE_BYTES, 2 * len(json.dumps(model, indent=1)))
        recorded = read_checksummed(path, "cpr_ext.store", free_bytes=free_bytes)
        if recorded is None:
            self._refuse_strangers()
            recorded = {"store_id": new_id(), **model}
            write_checksummed(path, "cpr_ext.store", recorded)
        elif differences := list_differences(recorded, model):
            raise StoreError(
                f"'{self.directory}' holds another model: {'; '.join(differences)}. "
                "Choose another directory, or build the model that the store was made with. To "
                "take its state into this one: a new directory, and recover(from_store=...)"
            )
        else:
            sync_directory(self.directory)  # as for a manifest, below
        if not is_id(recorded.get("store_id")):
            raise DamageError(f"{path}: it names no store")
        self.description = recorded
        self._write_copy()

    def _write_copy(self) -> None:
        """Write a second copy of the store's description, for ``cpr repair``."""
        model = self.description
        path = self.directory / STORE_COPY_FILE
        try:
            with suppress(StoreError):  # damaged: written anew
                if read_checksummed(path, "cpr_ext.store") == model:
                    return
            write_checksummed(path, "cpr_ext.store", model)
        except StorageError as error:
            logger.warning("the second copy of %s could not be written: %s", STORE_FILE, error)

    def _open_manifest(self, directory: Path) -> Manifest:
        make_directory(directory)
        require_directory(directory)
        lock = self._lock(directory)
        manifest = Manifest(directory, lock, self.description["store_id"])
        manifest.require_room(MAX_WRITABLE)
        self._opened.append(manifest)
        # It may be in the page cache only, its writer killed or refused before the last sync; what
        # other manifests note of it, and what is trained from it, must not outlive it.
        sync_directory(directory)
        return manifest

    @property
    def _manifests(self) -> list[Manifest]:
        return [self.dense, *self.shards]

    def _make_sound(self) -> None:
        """Refuse manifests of different states; only then remove leftovers of crashes."""
        refuse_outdated(self._manifests)
        refuse_other_states(self.dense, self.shards)
        for manifest in self._manifests:
            manifest.remove_unlisted()
            # From the start every directory has one, so that its neighbours tell if it is removed.
            if not manifest.is_recorded:
                self._commit(manifest, ())

    def _commit(self, manifest: Manifest, segments: tuple[SegmentRecord, ...]) -> None:
        others = [other for other in self._manifests if other is not manifest]
        manifest.commit(segments, {other.directory.name: other.generation for other in others})

    def _not_opened(self, error: OSError) -> StorageError:
        remedy = "The directory must be one that this process can make and write"
        if error.errno == errno.EEXIST:
            remedy = "It is no directory; choose another"
        text = f"cannot open the store '{self.directory}': {error.strerror or error}. {remedy}"
        return StorageError(error.errno, text, str(self.directory))

    def claim(self, claim: str) -> None:
        """Commit the state as it is: another store of the same state is no ancestor of this one.

        Args:
            claim: an identity that is an ancestor of all later commits of this store alone.
        """
        self.dense.ancestors = (*self.dense.ancestors, claim)
        self._commit(self.dense, self.dense.segments)

    @property
    def is_empty(self) -> bool:
        """True until the first snapshot is committed as a whole."""
        return not self.dense.segments

    @property
    def last_snapshot(self) -> int:
        """Highest snapshot number in use; 0 if none is."""
        return max(
            max(m.segments[-1].snapshot if m.segments else 0, m.highest_left_over)
            for m in self._manifests
        )

    def add_to_shard(self, shard: int, record: SegmentRecord) -> None:
        """Commit a segment of a shard."""
        manifest = self.shards[shard]
        self._commit(manifest, (*manifest.segments, record))

    def add_dense(self, record: SegmentRecord) -> None:
        """Commit the dense part of a snapshot, and with it the snapshot as a whole.

        Of older ones, full-recovery points stay as far as ``retention`` asks for them; the others
        are superseded.
        """
        points = self.retention.full_recovery_points
        older = (r for r in self.dense.segments if r not in self._passed_over)
        self._commit(self.dense, keep_points((*older, record), points))

    def revoke(self, snapshots: Collection[int]) -> None:
        """Record that snapshots of these numbers are no full-recovery points after all."""
        self._mark(snapshots, lambda r: replace(r, is_complete=False, is_proven=False))

    def note_proven(self, snapshots: Collection[int]) -> None:
        """Record that snapshots of these numbers are proven to be full-recovery points.

        Raises:
            StoreError: a directory of the store was moved or replaced: they may be gone.
        """
        self.require_in_place()
        self._mark(snapshots, lambda record: replace(record, is_proven=record.is_complete))

    def _mark(
        self, snapshots: Collection[int], mark: Callable[[SegmentRecord], SegmentRecord]
    ) -> None:
        records = tuple(
            mark(record) if record.snapshot in snapshots else record
            for record in self.dense.segments
        )
        if records != self.dense.segments:
            self._commit(self.dense, records)

    def retain(self, retention: Retention | None = None) -> None:
        """Remove what ``retention`` (else that of the store) no longer asks for.

        What cannot be removed costs space, not safety: it is logged, and tried again next time.
        """
        kept = plan_retention(
            self.dense.segments,
            [
                tuple(r for r in manifest.segments if r not in self._superseded)
                for manifest in self.shards
            ],
            retention or self.retention,
        )
        try:
            # The dense part first: it must never name a snapshot whose segments are gone.
            plan = zip(self._manifests, (kept.dense, *kept.shards), strict=True)
            for manifest, records in plan:
                if records != manifest.segments:
                    self._commit(manifest, records)
                if retention is not None:  # the disk is full
                    manifest.remove_dropped(at_once=True)
            self._passed_over = frozenset()
        except StorageError as error:
            logger.warning("old snapshots could not be removed: %s", error)

    @property
    def _superseded(self) -> frozenset[SegmentRecord]:
        """What was passed over, once a newer snapshot is committed as a whole."""
        is_newest = any(record in self._passed_over for record in self.dense.segments[-1:])
        return frozenset() if is_newest else self._passed_over

    def roll_back(self, snapshot: int, keep: Collection[Path] = ()) -> None:
        """Forget everything newer than ``snapshot``, which training goes back to.

        Args:
            keep: dense parts that could not be read. They, and all that they rest on, stay until a
                newer snapshot of all rows, which the caller sees to, is committed as a whole.
        """
        unreadable = [r.snapshot for r in self.dense.segments if self.dense.path_of(r) in keep]
        newest_kept = max([snapshot, *unreadable])
        self._forget_newer_than(newest_kept)
        self._passed_over = frozenset(
            r for manifest in self._manifests for r in manifest.segments if r.snapshot > snapshot
        )

    def _forget_newer_than(self, snapshot: int) -> None:
        # The dense part first: a crash in between leaves shards that are newer than any snapshot
        # committed as a whole, which the next roll-back removes.
        for manifest in self._manifests:
            kept = tuple(record for record in manifest.segments if record.snapshot <= snapshot)
            # A commit in doubt may be there after a crash, with what is given up here.
            if kept != manifest.segments or manifest.is_in_doubt:
                self._commit(manifest, kept)

    def require_in_place(self) -> None:
        """Raise unless this process may write to every directory of the store still.

        Raises:
            StoreError: the store was moved, removed or replaced, or is closed.
            UsageError: this is a forked child.
        """
        if not self._locks:
            raise StoreError(f"'{self.directory}' is closed; its lock was given back")
        for lock in self._locks:
            lock.require_in_place()

    def close(self) -> None:
        """Remove what waited for readers, if there are none by now; give the locks back.

        Closing twice is fine.

        Raises:
            StorageError: the operating system reports an error; all are given back all the same.
        """
        while self._opened:
            self._opened.pop().remove_dropped()
        refusals: list[tuple[Path, OSError]] = []
        while self._locks:
            lock = self._locks.pop()
            try:
                lock.close()
            except OSError as error:
                refusals.append((lock.path, error))
        for path, refusal in refusals:
            raise storage_error("close", path, refusal) from refusal


def describe_model(tables: Sequence[Table], num_shards: int) -> dict[str, Any]:
    """Return what STORE.json records of a model; the identity of the store is added to it."""
    return {
        "num_shards": num_shards,
        "tables": {table.name: _describe_table(table) for table in tables},
    }


def _describe_table(table: Table) -> dict[str, Any]:
    described: dict[str, Any] = {
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": DTYPE_NAMES[table.weight.dtype],
    }
    if table.slots is not None:
        described["keys"] = sorted(table.slots.arrays())
    return described | ({"part": table.part.to_json()} if table.part is not None else {})


def list_differences(recorded: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Return what differs between the model of a store and a live one, one sentence each."""
    try:
        old_tables, new_tables = recorded["tables"], model["tables"]
        differences = [
            f"table '{name}' is not in the model" for name in old_tables.keys() - new_tables
        ]
        differences += [
            f"table '{name}' is not in the store" for name in new_tables.keys() - old_tables
        ]
        for name in sorted(old_tables.keys() & new_tables.keys()):
            stored, live = old_tables[name], new_tables[name]
            for key in sorted(stored.keys() | live.keys()):
                if (new := live.get(key)) != (old := stored.get(key)):
                    differences.append(f"table '{name}' has {key} {old}, the model {new}")
        if recorded["num_shards"] != model["num_shards"]:
            differences.append(f"it has {recorded['num_shards']} shards, not {model['num_shards']}")
    except (KeyError, AttributeError, TypeError) as error:
        raise DamageError(f"{STORE_FILE} lacks what a store needs: {error!r}") from error
    return sorted(differences)
