"""The manifest: what is committed in one directory, replaced as a whole by one atomic rename."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.position import is_count
from cpr_ext.storage import leases
from cpr_ext.storage.backup_notes import noted_backups
from cpr_ext.storage.checksummed_json import REPAIR_HINT, read_checksummed, write_checksummed
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    MANIFEST_FILE,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    Kind,
    parse_segment_name,
)
from cpr_ext.storage.filesystem import require_directory, sync_directory
from cpr_ext.storage.lineage import NO_ID, commit_after, is_id, split_ids
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.retries import list_directory, retrying

logger = logger_of("saving")

FORMAT_NAME = "cpr_ext.manifest"
# So many commits before the newest are listed: which a copy may be of, and still be continued.
ANCESTORS_KEPT = 512


@dataclass(frozen=True)
class SegmentRecord:
    """What a manifest says of one segment.

    Attributes:
        file: name inside the manifest's directory; never a path.
        kind: ``base`` (all rows of the shard), ``partial`` (selected rows), ``merged`` (the rows of
            several partial ones) or ``dense``.
        snapshot: number of the snapshot; newer ones are higher.
        first_step, last_step: the steps at which its rows were captured.
        num_samples: samples trained when the last of them was captured.
        file_bytes, header_bytes, header_crc32c: how to read and check it.
        is_complete: dense only. The snapshots up to this one contain every row of every shard with
            its value at ``last_step``: a full-recovery point.
        is_proven: dense only. It is complete, and two proofs have confirmed that since: see
            ``SnapshotHandle.is_proven``.
        chain_before, chain: of the directory, before it and after it; see
            :mod:`cpr_ext.storage.lineage`. A merged segment has the chain of its newest source.
        shards: dense only. The chain of each shard when it was committed.
        is_mixed: dense only. A repair found no committed state: rows are of other commits.
    """

    file: str
    kind: Kind
    snapshot: int
    first_step: int
    last_step: int
    num_samples: int
    file_bytes: int
    header_bytes: int
    header_crc32c: int
    is_complete: bool = False
    chain_before: str = NO_ID
    chain: str = NO_ID
    shards: tuple[str, ...] = ()
    is_mixed: bool = False
    is_proven: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if not is_count(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r:.100}")
        object.__setattr__(self, "shards", tuple(self.shards))
        ids = (self.chain_before, self.chain, *self.shards)
        if not all(value == NO_ID or is_id(value) for value in ids):
            raise ValueError("a chain is no chain")
        flags = (self.is_complete, self.is_mixed, self.is_proven)
        if not isinstance(self.file, str) or any(type(flag) is not bool for flag in flags):
            raise ValueError("a field has another type")
        if parse_segment_name(self.file) != (self.snapshot, self.kind):
            raise ValueError(f"{self.file!r:.100} does not name segment {self.snapshot}")


_COUNTS = (
    *("snapshot", "first_step", "last_step", "num_samples"),
    *("file_bytes", "header_bytes", "header_crc32c"),
)


class Manifest:
    """The live segments of one directory, oldest first, and what it knows of its neighbours.

    Attributes:
        segments: the live ones.
        store_id: identity of the store, with which its chain begins.
        generation: counts the commits of this manifest; 0: none yet.
        commit_id: the commit that it is of; the store's identity: none yet.
        ancestors: commits before it, oldest first; of the dense directory, so many as are kept.
        pinned: commits that stay among them: what a copy in object storage is of. So do those that
            backups hold.
        seen: the generation that other manifests of the store had at least, by directory name,
            when this one was committed. One that is older than that has been replaced.
        highest_left_over: the number of a segment that no manifest names and that cannot be
            removed; 0: there is none.
        is_in_doubt: the last commit failed, perhaps after it had reached the disk.
        is_recorded: there is a manifest file; False: nothing was ever committed here.

    Args:
        lock: of the directory; without it nothing may be committed while others may write.
        store_id: of the store; None: that of the file.

    Raises:
        DamageError: the file is not what was committed in this directory of this store.
        StoreError: it has a format version not known here.
        StorageError: the operating system refused to read.
    """

    def __init__(
        self, directory: Path, lock: DirectoryLock | None = None, store_id: str | None = None
    ) -> None:
        self._begin(directory, store_id or NO_ID, lock)
        path = directory / MANIFEST_FILE
        try:
            retrying(directory, lambda: require_directory(directory))
        except (FileNotFoundError, NotADirectoryError):
            return
        content = read_checksummed(path, FORMAT_NAME)
        if content is None:
            return
        self.is_recorded = True
        try:
            self._take(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"{path}: {error}") from error
        if store_id is not None and self.store_id != store_id:
            identity = directory.parent / STORE_FILE
            raise DamageError(f"{path}: it is of another store than {identity}{REPAIR_HINT}")

    @classmethod
    def rebuilt(cls, directory: Path, generation: int, store_id: str) -> Manifest:
        """Return a manifest without segments for a directory whose file is of no use.

        Args:
            generation: the highest that the file, or any other manifest, records for it.
        """
        manifest = cls.__new__(cls)
        manifest._begin(directory, store_id)
        manifest.generation = manifest._highest_tried = generation
        return manifest

    def _begin(self, directory: Path, store_id: str, lock: DirectoryLock | None = None) -> None:
        self.directory = directory
        self.store_id = self.commit_id = store_id
        self._lock = lock
        self.ancestors: tuple[str, ...] = ()
        self.pinned: frozenset[str] = frozenset()
        self.segments: tuple[SegmentRecord, ...] = ()
        self.generation = 0
        self.seen: Mapping[str, int] = {}
        self.is_in_doubt = False
        self.highest_left_over = 0
        self.is_recorded = False
        self._highest_tried = 0
        self._to_remove: dict[str, float] = {}  # until when it waits for readers

    @property
    def chain(self) -> str:
        """The chain of the directory: of its newest segment."""
        return self.segments[-1].chain if self.segments else self.store_id

    def descends_from(self, commit_id: str) -> bool:
        """Return whether this manifest is known to follow from a commit, or is of it."""
        return commit_id == self.commit_id or commit_id in self.ancestors

    def _take(self, content: dict[str, Any]) -> None:
        self.segments = tuple(SegmentRecord(**record) for record in content["segments"])
        numbers = [record.snapshot for record in self.segments]
        if any(newer <= older for older, newer in pairwise(numbers)):
            raise ValueError("its snapshots do not ascend")
        if content["directory"] != self.directory.name:
            raise ValueError(f"it is the manifest of '{content['directory']!s:.100}'")
        generation, seen = content["generation"], content["seen"]
        if not is_count(generation) or not all(is_count(value) for value in seen.values()):
            raise ValueError("a generation is no number")
        ancestors = split_ids(content["ancestors"])
        self.store_id, self.commit_id = str(content["store_id"]), str(content["commit_id"])
        if not all(map(is_id, (*ancestors, self.commit_id))):
            raise ValueError("a commit is no commit")
        self.generation, self.seen, self.ancestors = generation, dict(seen), ancestors
        self._highest_tried = generation

    def commit(
        self, segments: tuple[SegmentRecord, ...], seen: Mapping[str, int] | None = None
    ) -> None:
        """Make ``segments`` the live ones; once this returns they are, whatever happens next.

        The files of those no longer live are removed afterwards, once nobody reads the store.

        Args:
            seen: generations of other manifests, each durable already; None: those known before.

        Raises:
            StorageError: the operating system refused; the old manifest is intact, unless only the
                directory could not be synced.
            StoreError: the directory was moved or replaced.
        """
        self.require_in_place()
        # The directory entries of new segment files must be durable before a manifest names them.
        sync_directory(self.directory)
        seen = dict(self.seen if seen is None else seen)
        # A commit that failed may have reached the disk all the same; its number is not used again.
        self._highest_tried += 1
        name, listed = self.directory.name, [asdict(record) for record in segments]
        commit_id = commit_after(self.commit_id, name, listed, secrets.token_hex(16))
        ancestors = self._ancestors_next()
        content = {
            "directory": name,
            "store_id": self.store_id,
            "generation": self._highest_tried,
            "commit_id": commit_id,
            "ancestors": "".join(ancestors),
            "seen": seen,
            "segments": listed,
        }
        path = self.directory / MANIFEST_FILE
        self.is_in_doubt = True
        write_checksummed(path, FORMAT_NAME, content)
        self.require_in_place()  # else it was committed elsewhere, or where nobody looks
        self.is_in_doubt, self.is_recorded = False, True
        dropped = set(self.segments) - set(segments)
        self.segments, self.generation, self.seen = segments, self._highest_tried, seen
        self.commit_id, self.ancestors = commit_id, ancestors
        until = time.monotonic() + leases.WAIT_SECONDS
        self._to_remove |= {record.file: until for record in dropped}
        self.remove_dropped()

    def _ancestors_next(self) -> tuple[str, ...]:
        """Return the ancestors of the next commit: the newest, and older ones that are pinned."""
        if self.directory.name != DENSE_DIRECTORY or self.generation == 0:
            return ()
        known = (*self.ancestors, self.commit_id)
        older: tuple[str, ...] = known[:-ANCESTORS_KEPT]
        if older:
            pinned = self.pinned | noted_backups(self.directory.parent)
            older = tuple(commit for commit in older if commit in pinned)
        return (*older, *known[-ANCESTORS_KEPT:])

    def remove_dropped(self, *, at_once: bool = False) -> None:
        """Remove the files of segments that are no longer live.

        Args:
            at_once: also while somebody reads the store; else that waits, for a bounded time.
        """
        live = {record.file for record in self.segments}  # a repair writes a file anew
        waiting = {file: until for file, until in self._to_remove.items() if file not in live}
        self._to_remove = {}
        if not waiting:
            return
        waits = not at_once and leases.has_readers(self.directory.parent)
        for file, until in waiting.items():
            if waits and time.monotonic() < until:
                self._to_remove[file] = until
                continue
            # A file that cannot be removed costs space, not safety; the next open tries again.
            with suppress(OSError):
                (self.directory / file).unlink()

    def require_room(self, limit: int) -> None:
        """Raise DamageError if a number is so high that little can be counted on from it."""
        records = ((r.snapshot, r.last_step, r.num_samples) for r in self.segments)
        highest = max((self.generation, *self.seen.values(), *chain.from_iterable(records)))
        if highest > limit:
            raise DamageError(
                f"{self.directory / MANIFEST_FILE}: it counts to {highest}; no training gets "
                f"beyond {limit}"
            )

    def require_in_place(self) -> None:
        """Raise StoreError if the lock says that the directory was moved or replaced."""
        if self._lock is not None:
            self._lock.require_in_place()

    def path_of(self, record: SegmentRecord) -> Path:
        """Return the file of a segment."""
        return self.directory / record.file

    def remove_unlisted(self) -> None:
        """Remove segments that no manifest names and temporary files: leavings of a crash.

        One that cannot be removed costs space and a warning; its number is not used again.
        """
        live = {record.file for record in self.segments}
        for path in list_directory(self.directory):
            parsed = parse_segment_name(path.name)
            left_over = parsed is not None and path.name not in live
            if left_over or path.name == MANIFEST_FILE + TEMPORARY_SUFFIX:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("a file left over cannot be removed: %s", error)
                    if parsed is not None:
                        self.highest_left_over = max(self.highest_left_over, parsed[0])
