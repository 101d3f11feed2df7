"""Read and check every byte of a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.verify import Expected, check_dense, check_rows, expect, refusal
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    MANIFEST_FILE,
    STORE_COPY_FILE,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    parse_segment_name,
    parse_shard_name,
    shard_name,
)
from cpr_ext.storage.leases import reader_lease
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retries import exists, list_directory, retrying
from cpr_ext.storage.stale_manifests import find_other_states, find_outdated
from cpr_ext.storage.store_reader import StoredTable, StoreIdentity, read_identity, require_shards

OnProgress = Callable[[int, int], None]
# Readings of the manifests until two are alike; a writer that is faster is not waited for.
_VIEWS = 100


@dataclass(frozen=True)
class Damage:
    """A file or directory that is not what was committed, and why."""

    path: str
    reason: str


@dataclass
class VerifyReport:
    """What a verification found.

    Attributes:
        store: the directory.
        files_checked, bytes_checked: how much was read.
        damaged: what is not as committed; empty: the store is sound.
        left_overs: files of an interrupted write, harmless; the next writer removes them.
    """

    store: str
    files_checked: int = 0
    bytes_checked: int = 0
    damaged: list[Damage] = field(default_factory=list)
    left_overs: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged."""
        return not self.damaged


def verify(
    store: str | os.PathLike[str], *, on_progress: OnProgress = lambda done, total: None
) -> VerifyReport:
    """Check every byte of every live file, and that they fit together.

    Args:
        store: the directory; a training process may be using it.
        on_progress: called with bytes checked so far and bytes in all.

    Raises:
        StoreError: not a store, or it has a version not known here.
        StorageError: the operating system refused to read.
    """
    return _Verification(Path(store), on_progress).run()


class _Verification:
    """One pass over a store; what is wrong is collected, not raised."""

    def __init__(self, store: Path, on_progress: OnProgress) -> None:
        self._store = store
        self._on_progress = on_progress
        self._report = VerifyReport(str(store))
        self._total_bytes = 0
        self._tables: Mapping[str, StoredTable] | None = None  # None: STORE.json is damaged

    def run(self) -> VerifyReport:
        with reader_lease(self._store):
            return self._run()

    def _run(self) -> VerifyReport:
        store_id, num_shards = self._identity()
        names = [DENSE_DIRECTORY, *map(shard_name, range(num_shards))]
        dense, *shards = self._view([self._store / name for name in names], store_id)
        found = [manifest for manifest in [dense, *shards] if manifest is not None]
        for outdated in find_outdated(found):
            if outdated.is_still_so():
                self._note(outdated.manifest.directory / MANIFEST_FILE, str(outdated))
        if dense is not None and len(found) == 1 + num_shards:
            for reason in find_other_states(dense, [m for m in shards if m is not None]):
                self._note(dense.directory / MANIFEST_FILE, reason)
        self._total_bytes = self._report.bytes_checked + sum(
            record.file_bytes for manifest in found for record in manifest.segments
        )
        for record in dense.segments if dense else ():
            assert dense is not None
            self._segment(dense, record, partial(self._check_dense, dense, record))
        for shard, manifest in enumerate(shards):
            if manifest is None:
                continue
            expected = expect(self._tables, shard, num_shards)
            for record in manifest.segments:
                self._segment(
                    manifest,
                    record,
                    partial(check_rows, manifest, record, expected, self._advance),
                )
            self._check_together(manifest, dense, expected)
        return self._report

    def _identity(self) -> tuple[str | None, int]:
        """Return the identity and number of shards of the store.

        If STORE.json is damaged, the number is that of the directories.
        """
        path = self._store / STORE_FILE
        numbers = [
            shard
            for entry in list_directory(self._store)
            if (shard := parse_shard_name(entry.name)) is not None
        ]
        try:
            identity = read_identity(self._store)
        except DamageError as error:
            self._note(path, error)
        except StoreError as error:
            if exists(path) or not numbers:
                raise  # a version not known here, or no store at all
            self._note(path, error)
        else:
            self._tables = identity.tables
            self._checked(_size(path))
            self._check_copy(identity)
            try:
                require_shards(self._store, identity.num_shards)
            except DamageError as error:
                self._note(path, error)
                return identity.store_id, max(numbers, default=-1) + 1
            return identity.store_id, identity.num_shards
        return None, max(numbers, default=-1) + 1

    def _check_copy(self, identity: StoreIdentity) -> None:
        path = self._store / STORE_COPY_FILE
        if not exists(path):
            return  # the next training run writes it
        try:
            if read_identity(self._store, STORE_COPY_FILE) != identity:
                self._note(path, f"differs from {STORE_FILE}")
        except StoreError as error:
            self._note(path, error)
        else:
            self._checked(_size(path))

    def _view(self, directories: list[Path], store_id: str | None) -> list[Manifest | None]:
        """Return the manifests, all of one moment; None for one that is damaged, which is noted."""
        before = [_read(directory, store_id) for directory in directories]
        for _ in range(_VIEWS):
            found = [_read(directory, store_id) for directory in directories]
            if [_state(one) for one in found] == [_state(one) for one in before]:
                break
            before = found
        view: list[Manifest | None] = []
        for directory, one in zip(directories, found, strict=True):
            if isinstance(one, StoreError):
                self._note(directory / MANIFEST_FILE, one)
                view.append(None)
                continue
            view.append(one)
            if one.is_recorded:
                self._checked(_size(directory / MANIFEST_FILE))
            try:
                one.require_room(MAX_SOUND)
            except DamageError as error:
                self._note(directory / MANIFEST_FILE, error)
            live = {record.file for record in one.segments}
            for entry in list_directory(directory):
                is_segment = parse_segment_name(entry.name) is not None and entry.name not in live
                if is_segment or entry.name == MANIFEST_FILE + TEMPORARY_SUFFIX:
                    self._report.left_overs.append(str(entry))
        return view

    def _segment(
        self, manifest: Manifest, record: SegmentRecord, check: Callable[[], None]
    ) -> None:
        before = self._report.bytes_checked
        try:
            check()
        except StoreError as error:
            if record not in Manifest(manifest.directory).segments:
                return  # training has replaced it meanwhile
            self._note(manifest.path_of(record), error)
        else:
            missing = record.file_bytes - (self._report.bytes_checked - before)
            assert missing == 0, f"{missing} bytes of {record.file} are under no checksum"
            self._report.files_checked += 1

    def _check_dense(self, manifest: Manifest, record: SegmentRecord) -> None:
        check_dense(manifest, record)
        self._advance(record.file_bytes)

    def _check_together(
        self, manifest: Manifest, dense: Manifest | None, expected: Expected
    ) -> None:
        if not (dense and dense.segments):
            return
        reason = refusal(manifest, dense.segments[-1].snapshot, expected)
        if reason is not None:
            self._note(manifest.directory / MANIFEST_FILE, reason)

    def _checked(self, size_bytes: int) -> None:
        self._report.files_checked += 1
        self._advance(size_bytes)

    def _advance(self, size_bytes: int) -> None:
        self._report.bytes_checked += size_bytes
        self._on_progress(self._report.bytes_checked, self._total_bytes)

    def _note(self, path: Path, reason: Exception | str) -> None:
        text = str(reason).removeprefix(f"{path}: ")
        self._report.damaged.append(Damage(str(path), text))


def _read(directory: Path, store_id: str | None) -> Manifest | StoreError:
    try:
        return Manifest(directory, store_id=store_id)
    except StoreError as error:
        return error


def _state(found: Manifest | StoreError) -> object:
    if isinstance(found, Manifest):
        return found.commit_id, found.segments
    return str(found)


def _size(path: Path) -> int:
    return retrying(path, lambda: path.stat().st_size)
