"""Read a remote store into a local directory, which then is an ordinary store."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cpr_ext.errors import CprError, DamageError, RemoteError, StoreError
from cpr_ext.storage.checksummed_json import write_checksummed
from cpr_ext.storage.file_names import (
    FETCHING_FILE,
    MANIFEST_FILE,
    SEGMENTS_DIRECTORY,
    TEMPORARY_SUFFIX,
    names_in_the_way,
)
from cpr_ext.storage.filesystem import make_directory, storage_error, sync_directory
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import FORMAT_NAME, SegmentRecord
from cpr_ext.storage.retries import exists, list_directory
from cpr_ext.wings.remote.objects import Objects
from cpr_ext.wings.remote.range_reading import WantedFile, read_objects
from cpr_ext.wings.remote.remote_state import RemoteState, newest_state, object_key

_TRIES = 5


def fetch_store(
    objects: Objects,
    directory: Path,
    *,
    address: str = "the copy",
    headers_only: bool = False,
) -> RemoteState:
    """Read the newest state into ``directory``, which must be empty or missing.

    It becomes a store by one rename, once all else is there. What a read has left that was cut off
    is removed. Nothing is written outside the directory, so it may be a mount point or a link.

    Args:
        address: of the objects, for errors: those of all stores have names of one form.
        headers_only: of each segment only the header, enough for ``cpr inspect``.

    Raises:
        StoreError: there is no state, the directory is not empty, or another process writes there.
        DamageError: an object is not as written, or missing.
        RemoteError: a request failed, or objects are removed before they are read.
        StorageError: the directory could not be written.
    """
    directory = directory.absolute()
    try:
        make_directory(directory)
        lock = DirectoryLock(directory)
        try:
            if found := names_in_the_way(path.name for path in list_directory(directory)):
                raise StoreError(
                    f"'{directory}' holds {found[0]!r:.100}; a store is put into an empty or a new "
                    "directory only"
                )
            _clear(directory)
            try:
                return _fetch(objects, directory, headers_only=headers_only)
            except BaseException as error:
                _clear(directory)
                if isinstance(error, StoreError | RemoteError):
                    raise type(error)(f"{address}: {error}") from error
                raise
        finally:
            lock.close()
    except OSError as error:
        if isinstance(error, CprError):
            raise
        raise storage_error("fill", directory, error) from error


def _fetch(objects: Objects, directory: Path, *, headers_only: bool) -> RemoteState:
    segments, begun = directory / SEGMENTS_DIRECTORY, directory / FETCHING_FILE
    for tries_left in reversed(range(_TRIES)):
        state = newest_state(objects)
        if state is None:
            raise StoreError("the remote store holds no state yet")
        _clear(directory)
        write_checksummed(begun, FORMAT_NAME, state.manifest.text)
        segments.mkdir()
        wanted = [
            _wanted(state, record, segments / record.file, headers_only=headers_only)
            for record in state.manifest.records()
        ]
        try:
            read_objects(objects, wanted)
        except FileNotFoundError as error:
            _require_removed(objects, state, error, tries_left)
            continue
        _keep_time(segments, state)
        sync_directory(segments)
        begun.replace(directory / MANIFEST_FILE)
        sync_directory(directory)
        return state
    raise AssertionError("the last try returns or raises")


def _clear(directory: Path) -> None:
    """Remove what a read has left, last the file that shows that it is of one."""
    begun = directory / FETCHING_FILE
    if exists(begun):
        shutil.rmtree(directory / SEGMENTS_DIRECTORY, ignore_errors=True)
        sync_directory(directory)
        begun.unlink()


def _keep_time(segments: Path, state: RemoteState) -> None:
    """Let the newest dense part be as old as it is: what is read is not newer for that."""
    if (newest := state.manifest.newest) is not None and (segments / newest.file).exists():
        os.utime(segments / newest.file, (state.unix_seconds, state.unix_seconds))


def _require_removed(
    objects: Objects, state: RemoteState, error: FileNotFoundError, tries_left: int
) -> None:
    """Raise unless a writer may have removed an object, and there is a newer state to try."""
    newer = newest_state(objects)
    if newer is None or newer.manifest.commit_id == state.manifest.commit_id:
        raise DamageError(f"the remote store lacks an object: {error}") from error
    if not tries_left:
        raise RemoteError(
            f"objects of each of {_TRIES} states were removed before they were read. The job that "
            "is copied keeps them for RemoteOptions(keep_seconds=...): make it longer"
        ) from error


def _wanted(
    state: RemoteState, record: SegmentRecord, path: Path, *, headers_only: bool = False
) -> WantedFile:
    key = object_key(record)
    end = record.header_bytes if headers_only else record.file_bytes
    checksum = None if headers_only else state.checksums[key]
    return WantedFile(key, path, end, record.file_bytes, checksum)


def fetch_segment(objects: Objects, state: RemoteState, record: SegmentRecord, path: Path) -> bool:
    """Replace ``path`` by a segment of a state; False if that does not have it.

    Raises:
        DamageError, FileNotFoundError: its object is not as written, or was removed.
        RemoteError: a request failed.
    """
    if object_key(record) not in state.checksums:
        return False
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        read_objects(objects, [_wanted(state, record, temporary)])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True
