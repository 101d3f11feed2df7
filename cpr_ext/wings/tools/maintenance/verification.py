"""Read and check every byte of a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.recovery.verify import checked_pieces, refusal
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.storage.file_names import (
    MANIFEST_FILE,
    PREVIOUS_FILE,
    SEGMENTS_DIRECTORY,
    TEMPORARY_SUFFIX,
    parse_segment_name,
)
from cpr_ext.storage.locks import reader_lease
from cpr_ext.storage.manifest import SegmentRecord, older_than_previous, read_manifest
from cpr_ext.storage.retries import exists, list_directory, retrying
from cpr_ext.storage.store_reader import StoreReader

OnProgress = Callable[[int, int], None]


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

    def run(self) -> VerifyReport:
        with reader_lease(self._store):
            self._check_previous()
            self._check_manifest()
        return self._report

    def _check_previous(self) -> None:
        path = self._store / PREVIOUS_FILE
        try:
            if read_manifest(self._store, PREVIOUS_FILE) is not None:
                self._checked(_size(path))
        except FileNotFoundError:
            pass  # training replaces it
        except DamageError as error:
            self._note(path, f"{error} (the next snapshot writes it again)")

    def _check_manifest(self) -> None:
        path = self._store / MANIFEST_FILE
        try:
            reader = StoreReader(self._store)
            self._checked(_size(path))
            reader.manifest.require_room(MAX_SOUND, path)
        except DamageError as error:
            self._note(path, error)
            return
        manifest = reader.manifest
        older = older_than_previous(self._store, manifest)
        if older is not None and StoreReader(self._store).manifest == manifest:
            self._note(path, older)
        live = {record.file for record in manifest.records()}
        segments = self._store / SEGMENTS_DIRECTORY
        for entry in [*list_directory(segments), path.with_name(path.name + TEMPORARY_SUFFIX)]:
            is_segment = parse_segment_name(entry.name) is not None and entry.name not in live
            if is_segment or (entry.parent == self._store and exists(entry)):
                self._report.left_overs.append(str(entry))
        self._total_bytes = self._report.bytes_checked + manifest.file_bytes
        for record in manifest.records():
            self._check_segment(reader, record)
        if (reason := refusal(reader, manifest.rows)) is not None:
            self._note(path, reason)

    def _check_segment(self, reader: StoreReader, record: SegmentRecord) -> None:
        before = self._report.bytes_checked
        try:
            for size_bytes in checked_pieces(reader, record):
                self._advance(size_bytes)
        except StoreError as error:
            now = read_manifest(self._store)
            if now is not None and record.file not in {each.file for each in now.records()}:
                return  # training has replaced it meanwhile
            self._note(reader.path_of(record), error)
        else:
            missing = record.file_bytes - (self._report.bytes_checked - before)
            assert missing == 0, f"{missing} bytes of {record.file} are under no checksum"
            self._report.files_checked += 1

    def _checked(self, size_bytes: int) -> None:
        self._report.files_checked += 1
        self._advance(size_bytes)

    def _advance(self, size_bytes: int) -> None:
        self._report.bytes_checked += size_bytes
        self._on_progress(self._report.bytes_checked, self._total_bytes)

    def _note(self, path: Path, reason: Exception | str) -> None:
        text = str(reason).removeprefix(f"{path}: ")
        self._report.damaged.append(Damage(str(path), text))


def _size(path: Path) -> int:
    return retrying(path, lambda: path.stat().st_size)
