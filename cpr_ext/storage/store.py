"""The store directory of one training process, opened for writing.

::

    LOCK                                        whose holder writes here; taken first
    MANIFEST.json                               which model this is, and what is committed
    MANIFEST.prev                               the one before, for ``cpr repair``
    segments/00000012-partial.safetensors       the rows that snapshot 12 saved
    segments/00000012-dense.safetensors         all of it that is not a table row

A snapshot writes its segments first. One rename of the manifest makes them live, all at once.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.position import MAX_WRITABLE
from cpr_ext.state.table import Table
from cpr_ext.storage import locks
from cpr_ext.storage.checksummed_json import FREE_BYTES, REPAIR_HINT
from cpr_ext.storage.file_names import (
    FETCHING_FILE,
    MANIFEST_FILE,
    PREVIOUS_FILE,
    SEGMENTS_DIRECTORY,
    TEMPORARY_SUFFIX,
    names_in_the_way,
    parse_segment_name,
)
from cpr_ext.storage.filesystem import (
    make_directory,
    require_directory,
    storage_error,
    sync_directory,
)
from cpr_ext.storage.locks import DirectoryLock, require_same
from cpr_ext.storage.manifest import (
    ANCESTORS_KEPT,
    Manifest,
    Records,
    SegmentRecord,
    StoredModel,
    older_than_previous,
    read_manifest,
    write_manifest,
)
from cpr_ext.storage.origin import Origin
from cpr_ext.storage.retention import Retention, plan_retention
from cpr_ext.storage.retries import exists, list_directory
from cpr_ext.storage.store_reader import StoreReader

logger = logger_of("saving")


class Store:
    """A store, held by its lock from construction until :meth:`close`.

    Attributes:
        directory: the store.
        segments: the directory of its segments.
        manifest: what is committed.
        retention: how much history to keep.
        keep_from_step: full-recovery points from this step on stay; None: as retention says.
        is_in_doubt: the last commit failed, perhaps after it had reached the disk.
        origin: a copy that follows this store; None: there is none.

    Args:
        directory: the store; made if it does not exist. A relative path is one of the working
            directory at this moment.
        tables: the tables of the model; a store of other tables is refused.
        retention: how much history to keep.
        origin: a copy that is to follow this store from here on.

    Raises:
        StoreError: the directory is not a store, holds another model, or is in use; names the
            process. Or the copy is not of an earlier state of it.
        DamageError: the manifest is not what was committed.
        StorageError: the directory cannot be made, read or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        tables: Sequence[Table],
        retention: Retention | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.retention = retention or Retention()
        self.keep_from_step: int | None = None
        self.is_in_doubt = False
        self.origin: Origin | None = None
        self._lock: DirectoryLock | None = None
        self._highest_left_over = 0  # the number of a segment that cannot be removed
        self._to_remove: dict[str, float] = {}  # until when a file waits for readers
        self._doubtful: frozenset[str] = frozenset()  # files of a commit in doubt
        try:
            self.directory = self.directory.absolute()
            self.segments = self.directory / SEGMENTS_DIRECTORY
            make_directory(self.directory)
            self._refuse_others()  # before anything is made here
            self._lock = DirectoryLock(self.directory)
            self.manifest = self._open(StoredModel.of(tables))
        except BaseException as error:
            with suppress(StorageError):
                self.close()
            if isinstance(error, OSError):
                raise self._not_opened(error) from error
            raise
        if origin is not None:
            self._begin_copy(origin)

    def _begin_copy(self, origin: Origin) -> None:
        try:
            origin.begin(self.manifest)
            self.origin = origin
            # From here on a clone of this directory is no ancestor of it.
            self._commit_records(self.manifest.dense, self.manifest.rows)
        except BaseException:
            self.close()
            raise
        weakref.finalize(self, origin.let_go).atexit = False

    def _refuse_others(self) -> None:
        """Raise StoreError if this is no store, and no empty directory either."""
        names = [path.name for path in list_directory(self.directory)]
        in_the_way = names_in_the_way(names)
        # Asked second: what another process makes here comes after its manifest.
        if exists(self.directory / MANIFEST_FILE):
            return
        if FETCHING_FILE in names:
            raise StoreError(
                f"'{self.directory}' was being filled from a copy in object storage, which was "
                "cut off. Open it with that copy (remote=), or choose another directory"
            )
        if in_the_way == [SEGMENTS_DIRECTORY] and not list_directory(self.segments):
            return  # a first open that was interrupted
        if {PREVIOUS_FILE, SEGMENTS_DIRECTORY} & set(in_the_way):
            raise DamageError(f"{self.directory / MANIFEST_FILE} is missing{REPAIR_HINT}")
        if in_the_way:
            raise StoreError(
                f"'{self.directory}' is not a cpr_ext store (it has no {MANIFEST_FILE}) but holds "
                f"{in_the_way[0]!r}; choose an empty or a new directory"
            )

    def _open(self, model: StoredModel) -> Manifest:
        path = self.directory / MANIFEST_FILE
        # As large as that of the live model it may be, before anything is saved.
        free_bytes = max(FREE_BYTES, 2 * len(model.text) + 64 * ANCESTORS_KEPT)
        manifest = read_manifest(self.directory, free_bytes=free_bytes)
        if manifest is None:
            self._refuse_others()
            make_directory(self.segments)  # durable before a manifest is
            self._require_segments()
            manifest = Manifest.new(model)
            write_manifest(self.directory, manifest)
        elif differences := manifest.model.differences(model):
            raise StoreError(
                f"'{self.directory}' holds another model: {'; '.join(differences)}. "
                "Choose another directory, or build the model that the store was made with. To "
                "take its state into this one: a new directory, and recover(from_store=...)"
            )
        else:
            manifest.require_room(MAX_WRITABLE, path)
            if (wrong := older_than_previous(self.directory, manifest)) is not None:
                raise DamageError(wrong)
            # It may be in the page cache only, its writer killed or refused before the last sync;
            # what is trained from it must not outlive it.
            self._require_segments()
            for directory in (self.segments, self.directory):
                sync_directory(directory)
        self._remove_unlisted(manifest)
        return manifest

    def _require_segments(self) -> None:
        try:
            require_directory(self.segments)
        except FileNotFoundError as error:
            raise DamageError(f"{self.segments} is missing{REPAIR_HINT}") from error
        self._segments_status = os.lstat(self.segments)

    def _remove_unlisted(self, manifest: Manifest) -> None:
        """Remove segments that the manifest does not name and temporary files: of a crash.

        One that cannot be removed costs space and a warning; its number is not used again.
        """
        live = {record.file for record in manifest.records()}
        temporary = self.directory / (MANIFEST_FILE + TEMPORARY_SUFFIX)
        for path in [temporary, *list_directory(self.segments)]:
            parsed = parse_segment_name(path.name)
            if path != temporary and (parsed is None or path.name in live):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("a file left over cannot be removed: %s", error)
                if parsed is not None:
                    self._highest_left_over = max(self._highest_left_over, parsed[0])

    def _not_opened(self, error: OSError) -> StorageError:
        remedy = "The directory must be one that this process can make and write"
        if error.errno == errno.EEXIST:
            remedy = "It is no directory; choose another"
        text = f"cannot open the store '{self.directory}': {error.strerror or error}. {remedy}"
        return StorageError(error.errno, text, str(self.directory))

    @property
    def is_empty(self) -> bool:
        """True until the first snapshot is committed."""
        return not self.manifest.dense

    @property
    def last_snapshot(self) -> int:
        """Highest snapshot number in use; 0 if none is."""
        newest = self.manifest.newest
        return max(0 if newest is None else newest.snapshot, self._highest_left_over)

    def path_of(self, record: SegmentRecord) -> Path:
        """Return the file of a segment."""
        return self.segments / record.file

    def view(self) -> StoreReader:
        """Return what reads the committed state as it is now."""
        return StoreReader(self.directory, self.manifest)

    def add(self, dense: SegmentRecord, rows: SegmentRecord | None) -> None:
        """Commit a snapshot: its dense part and the segment of its rows, if it has any.

        What the snapshot supersedes goes, as far as ``retention`` does not ask for it.

        Raises:
            StorageError: the operating system refused. The manifest is as before, unless
                :attr:`is_in_doubt`. Then the files of the snapshot must stay, see :meth:`keeps`.
            StoreError: the directory was moved or replaced.
        """
        old = self.manifest
        of_rows = () if rows is None else (rows,)
        records = (*old.dense, dense), (*old.rows, *of_rows)
        kept = plan_retention(*records, self.retention, self.keep_from_step)
        try:
            self._commit(old.next(kept.dense, kept.rows, commit_id=dense.id, pinned=self._pinned))
        except StorageError:
            if self.is_in_doubt:
                self._doubtful |= {record.file for record in (dense, *of_rows)}
            raise

    def keeps(self, file: str) -> bool:
        """Return whether a segment's file must stay: a commit in doubt may be there, and names it.

        It is removed after the next commit.
        """
        return file in self._doubtful

    def note_complete(self, snapshot: int) -> None:
        """Record that the snapshot of a number is a full-recovery point; older ones may go.

        Raises:
            StoreError: a directory of the store was moved or replaced: it may be gone.
        """
        old = self.manifest
        dense = tuple(
            replace(record, is_complete=True) if record.snapshot == snapshot else record
            for record in old.dense
        )
        if dense != old.dense:
            kept = plan_retention(dense, old.rows, self.retention, self.keep_from_step)
            self._commit_records(kept.dense, kept.rows)

    def release_history(self) -> None:
        """Remove all but the newest snapshot, also while somebody reads: the disk is full.

        What cannot be removed costs space, not safety: it is logged.
        """
        old = self.manifest
        kept = plan_retention(old.dense, old.rows, Retention(0), self.keep_from_step)
        try:
            if (kept.dense, kept.rows) != (old.dense, old.rows):
                self._commit_records(kept.dense, kept.rows)
            self._remove_dropped(at_once=True)
        except StorageError as error:
            logger.warning("old snapshots could not be removed: %s", error)

    def roll_back(self, snapshot: int) -> None:
        """Forget everything newer than ``snapshot``, which training goes back to."""
        old = self.manifest
        dense, rows = (
            tuple(record for record in records if record.snapshot <= snapshot)
            for records in (old.dense, old.rows)
        )
        # A commit in doubt may be there after a crash, with what is given up here.
        if (dense, rows) != (old.dense, old.rows) or self.is_in_doubt:
            self._commit_records(dense, rows)

    @property
    def _pinned(self) -> frozenset[str]:
        return frozenset() if self.origin is None else self.origin.pinned

    def _commit_records(self, dense: Records, rows: Records) -> None:
        self._commit(self.manifest.next(dense, rows, pinned=self._pinned))

    def _commit(self, manifest: Manifest) -> None:
        """Make ``manifest`` the committed state; once this returns it is, whatever happens next.

        The files of segments that it does not name are removed afterwards, once nobody reads.
        """
        self.require_in_place()
        # The directory entries of new segment files must be durable before a manifest names them.
        sync_directory(self.segments)
        if self.is_in_doubt:  # else the one before, which is linked next, might outlive its place
            sync_directory(self.directory)
        self.is_in_doubt = True
        write_manifest(self.directory, manifest)
        self.require_in_place()  # else it was committed elsewhere, or where nobody looks
        self.is_in_doubt = False
        dropped = {record.file for record in self.manifest.records()} | self._doubtful
        self.manifest, self._doubtful = manifest, frozenset()
        until = time.monotonic() + locks.WAIT_SECONDS
        self._to_remove |= dict.fromkeys(dropped, until)
        self._remove_dropped()
        if self.origin is not None:
            self.origin.on_commit(manifest)

    def _remove_dropped(self, *, at_once: bool = False) -> None:
        """Remove the files of segments that are no longer live.

        Args:
            at_once: also while somebody reads the store; else that waits, for a bounded time.
        """
        live = {record.file for record in self.manifest.records()}
        waiting = {file: until for file, until in self._to_remove.items() if file not in live}
        self._to_remove = {}
        if not waiting:
            return
        waits = not at_once and locks.has_readers(self.directory)
        for file, until in waiting.items():
            if waits and time.monotonic() < until:
                self._to_remove[file] = until
                continue
            # A file that cannot be removed costs space, not safety; the next open tries again.
            with suppress(OSError):
                (self.segments / file).unlink()

    def require_in_place(self) -> None:
        """Raise unless this process may write to the store still.

        Raises:
            StoreError: the store was moved, removed or replaced, or is closed.
            UsageError: this is a forked child.
        """
        if self._lock is None:
            raise StoreError(f"'{self.directory}' is closed; its lock was given back")
        self._lock.require_in_place()
        require_same(
            self.segments,
            self._segments_status,
            f"'{self.segments}' was moved, removed or replaced after this process had opened it, "
            "perhaps by a symbolic link, which readers do not follow inside a store",
        )

    def close(self) -> None:
        """Remove what waited for readers, if there are none by now; give the lock back.

        Closing twice is fine.

        Raises:
            StorageError: the operating system reports an error; it is given back all the same.
        """
        if (lock := self._lock) is None:
            return
        self._lock = None
        if hasattr(self, "manifest"):
            self._remove_dropped()
        try:
            lock.close()
        except OSError as error:
            raise storage_error("close", lock.path, error) from error
