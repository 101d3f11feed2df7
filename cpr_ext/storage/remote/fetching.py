"""Read a remote store into a local directory, which then is an ordinary store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cpr_ext.errors import CprError, DamageError, StoreError
from cpr_ext.storage.checksummed_json import write_checksummed
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    FETCHING_FILE,
    MANIFEST_FILE,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    is_store_directory,
    names_in_the_way,
)
from cpr_ext.storage.filesystem import make_directory, storage_error, sync_directory
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import FORMAT_NAME, SegmentRecord
from cpr_ext.storage.reading import exists, list_directory
from cpr_ext.storage.remote.objects import (
    Objects,
    RemoteError,
    RemoteOptions,
    is_address,
    open_objects,
)
from cpr_ext.storage.remote.pins import READERS, newest_pinned
from cpr_ext.storage.remote.range_reading import WantedFile, read_objects
from cpr_ext.storage.remote.remote_state import (
    RemoteDirectory,
    RemoteState,
    newest_state,
    object_key,
)

_TRIES = 5


def fetch_store(
    objects: Objects,
    directory: Path,
    *,
    shards: Collection[str] | None = None,
    headers_only: bool = False,
) -> RemoteState:
    """Read the newest state into ``directory``, which must be empty or missing.

    It becomes a store by one rename, once all else is there. What a read has left that was cut off
    is removed. Nothing is written outside the directory, so it may be a mount point or a link.

    Args:
        shards: names of the directories whose segments are read; None: all.
        headers_only: of each segment only the header, enough for ``cpr inspect``.

    Raises:
        StoreError: there is no state, the directory is not empty, or another process writes there.
        DamageError: an object is not as written, or missing.
        RemoteError: a request failed, or the writer removes objects before they are read.
        StorageError: the directory could not be written.
    """
    directory = directory.absolute()
    try:
        make_directory(directory)
        lock = DirectoryLock(directory)
        try:
            require_vacant(directory)
            return _fetch_newest(objects, directory, shards, headers_only)
        finally:
            lock.close()
    except OSError as error:
        if isinstance(error, CprError):
            raise
        raise storage_error("read the remote store into", directory, error) from error


def require_vacant(directory: Path) -> None:
    """Raise StoreError if a directory holds anything that a new store does not begin with."""
    if found := names_in_the_way(path.name for path in list_directory(directory)):
        raise StoreError(
            f"'{directory}' holds {found[0]!r:.100}; a copy is read into an empty or a new "
            "directory only"
        )


def _fetch_newest(
    objects: Objects, directory: Path, shards: Collection[str] | None, headers_only: bool
) -> RemoteState:
    try:
        for tries_left in reversed(range(_TRIES)):
            with newest_pinned(objects) as state:
                if state is None:
                    raise StoreError("the remote store holds no state yet")
                _clear(directory)
                try:
                    _fetch(objects, state, directory, shards, headers_only=headers_only)
                except FileNotFoundError as error:
                    _require_removed(objects, state, error, tries_left)
                else:
                    return state
    except BaseException:
        _clear(directory)
        raise
    raise AssertionError("the last try returns or raises")


def _require_removed(
    objects: Objects, state: RemoteState, error: FileNotFoundError, tries_left: int
) -> None:
    """Raise unless a writer may have removed an object, and there is a newer state to try."""
    newer = newest_state(objects)
    if newer is None or newer.number == state.number:
        raise DamageError(f"the remote store lacks an object: {error}") from error
    if not tries_left:
        raise RemoteError(
            f"objects of each of {_TRIES} states were removed before they were read: the job that "
            "is copied adds states faster. If this reader may create and delete objects in "
            f"'{READERS}', the job keeps those of its state"
        ) from error


def _clear(directory: Path) -> None:
    """Remove what a read has left, last the file that shows that it is of a read."""
    begun = directory / FETCHING_FILE
    if not exists(begun):
        return
    for path in list_directory(directory):
        if is_store_directory(path.name):
            shutil.rmtree(path)
    sync_directory(directory)
    begun.unlink()


def _fetch(
    objects: Objects,
    state: RemoteState,
    target: Path,
    shards: Collection[str] | None,
    *,
    headers_only: bool,
) -> None:
    write_checksummed(target / FETCHING_FILE, "cpr_ext.store", dict(state.view.model))
    wanted = []
    for name in state.view.directories:
        (target / name).mkdir()
    for key, (name, record) in state.view.records().items():
        if shards is None or name in shards:
            checksum = None if headers_only else state.checksums[key]
            wanted.append(_wanted(key, record, target / name / record.file, checksum))
    with ThreadPoolExecutor(1) as pool:  # the disk does this while the network is waited for
        manifests = pool.submit(_write_manifests, target, state)
        read_objects(objects, wanted)
        manifests.result()
    _keep_time(target, state)
    for name in state.view.directories:
        sync_directory(target / name)  # the names of segments that came after its manifest
    sync_directory(target)
    (target / FETCHING_FILE).replace(target / STORE_FILE)
    sync_directory(target)


def _keep_time(target: Path, state: RemoteState) -> None:
    """Let the newest dense part be as old as it is: what is read is not newer for that."""
    for record in state.view.directories[DENSE_DIRECTORY].segments[-1:]:
        path = target / DENSE_DIRECTORY / record.file
        if path.exists():
            os.utime(path, (state.view.unix_seconds, state.view.unix_seconds))


def _write_manifests(target: Path, state: RemoteState) -> None:
    for name, remote in state.view.directories.items():
        _write_manifest(target / name, name, remote, state)


def _write_manifest(
    directory: Path, name: str, remote: RemoteDirectory, state: RemoteState
) -> None:
    content = {
        "directory": name,
        "store_id": state.view.model["store_id"],
        **remote.to_content(),
    }
    write_checksummed(directory / MANIFEST_FILE, FORMAT_NAME, content)


def fetch_directory(objects: Objects, state: RemoteState, name: str, store: Path) -> None:
    """Read one directory of a state into a store that lacks it; it appears as a whole.

    Raises:
        DamageError: an object is not as written, or was removed.
        RemoteError: a request failed.
        StorageError: the directory could not be written.
    """
    target = store / (name + ".fetching")
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        remote = state.view.directories[name]
        keys = {object_key(name, record): record for record in remote.segments}
        read_objects(
            objects,
            [
                _wanted(key, record, target / record.file, state.checksums[key])
                for key, record in keys.items()
            ],
        )
        _write_manifest(target, name, remote, state)
        target.rename(store / name)
        sync_directory(store)
    except FileNotFoundError as error:
        raise DamageError(f"the remote store lacks an object: {error}") from error
    except OSError as error:
        if isinstance(error, CprError):
            raise
        raise storage_error("read the remote store into", store / name, error) from error
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _wanted(key: str, record: SegmentRecord, path: Path, checksum: int | None) -> WantedFile:
    """Return a segment's file; ``checksum`` None: only its header is read."""
    end = record.header_bytes if checksum is None else record.file_bytes
    return WantedFile(key, path, end, record.file_bytes, checksum)


def fetch_segment(
    objects: Objects, state: RemoteState, directory: str, record: SegmentRecord, path: Path
) -> bool:
    """Replace ``path`` by a segment of a state; False if that does not have it.

    Raises:
        DamageError, FileNotFoundError: its object is not as written, or was removed.
        RemoteError: a request failed.
    """
    key = object_key(directory, record)
    if (checksum := state.checksums.get(key)) is None:
        return False
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        read_objects(objects, [_wanted(key, record, temporary, checksum)])
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


@contextmanager
def local_store(store: str, *, headers_only: bool = False) -> Iterator[str]:
    """Return a directory that holds a store; that of an address is temporary."""
    if not is_address(store):
        yield store
        return
    with TemporaryDirectory(prefix="cpr_ext-") as temporary:
        directory = Path(temporary) / "store"
        fetch_store(open_objects(RemoteOptions(store)), directory, headers_only=headers_only)
        yield str(directory)
