"""Read a remote store into a local directory, which then is an ordinary store."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from cpr_ext.errors import CprError, DamageError, RemoteError, StoreError
from cpr_ext.storage.file_names import TEMPORARY_SUFFIX
from cpr_ext.storage.filesystem import storage_error, sync_directory
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.remote.filling import Filling, LackingFile, filling, write_manifest
from cpr_ext.storage.remote.objects import (
    Objects,
    RemoteOptions,
    is_address,
    open_objects,
)
from cpr_ext.storage.remote.pins import READERS, newest_pinned
from cpr_ext.storage.remote.range_reading import WantedFile, read_objects
from cpr_ext.storage.remote.remote_state import RemoteState, newest_state, object_key

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
    with filling(directory) as filled:
        return fetch_into(objects, filled, shards=shards, headers_only=headers_only)


def fetch_into(
    objects: Objects,
    filled: Filling,
    *,
    shards: Collection[str] | None = None,
    headers_only: bool = False,
) -> RemoteState:
    """Read what a directory that is being filled lacks of the newest state; errors as above."""
    for tries_left in reversed(range(_TRIES)):
        with newest_pinned(objects) as state:
            if state is None:
                raise StoreError("the remote store holds no state yet")
            read = partial(_read_wanted, objects, state, headers_only)
            try:
                filled.fill(state.view, read, shards)
            except FileNotFoundError as error:
                _require_removed(objects, state, error, tries_left)
            else:
                return state
    raise AssertionError("the last try returns or raises")


def _read_wanted(
    objects: Objects, state: RemoteState, headers_only: bool, wanted: Sequence[LackingFile]
) -> None:
    files = []
    for name, record, path in wanted:
        key = object_key(name, record)
        checksum = None if headers_only else state.checksums[key]
        files.append(_wanted(key, record, path, checksum))
    read_objects(objects, files)


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
        write_manifest(target, name, remote, state.view.store_id)
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
