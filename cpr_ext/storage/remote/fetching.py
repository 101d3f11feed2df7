"""Read a remote store into a local directory, which then is an ordinary store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cpr_ext._native import native
from cpr_ext.errors import CprError, DamageError, StoreError
from cpr_ext.storage.checksummed_json import write_checksummed
from cpr_ext.storage.file_names import MANIFEST_FILE, STORE_FILE, TEMPORARY_SUFFIX
from cpr_ext.storage.filesystem import (
    create_anew,
    make_directory,
    storage_error,
    sync_directory,
)
from cpr_ext.storage.manifest import FORMAT_VERSION, SegmentRecord
from cpr_ext.storage.remote.objects import (
    Objects,
    RemoteError,
    RemoteOptions,
    brief,
    is_address,
    open_objects,
)
from cpr_ext.storage.remote.remote_state import RemoteState, newest_state, object_key

RANGE_BYTES = 8 << 20
PARALLEL = 8
_TRIES = 5


def fetch_store(
    objects: Objects,
    directory: Path,
    *,
    shards: Collection[str] | None = None,
    headers_only: bool = False,
    finish: Callable[[Path, int, str], None] | None = None,
) -> RemoteState:
    """Read the newest state into ``directory``, which must be empty or missing.

    The directory appears as a whole: before, the data is in one next to it.

    Args:
        shards: names of the directories whose segments are read; None: all.
        headers_only: of each segment only the header, enough for ``cpr inspect``.
        finish: called with the directory before it appears, and number and writer of the state.

    Raises:
        StoreError: there is no state.
        DamageError: an object is not as written, or missing.
        RemoteError: a request failed.
        StorageError: the directory could not be written.
    """
    directory = directory.absolute()
    target = directory.with_name(directory.name + ".fetching")
    try:
        return _fetch_newest(objects, directory, target, shards, headers_only, finish)
    except OSError as error:
        if isinstance(error, CprError):
            raise
        raise storage_error("read the remote store into", directory, error) from error
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _fetch_newest(
    objects: Objects,
    directory: Path,
    target: Path,
    shards: Collection[str] | None,
    headers_only: bool,
    finish: Callable[[Path, int, str], None] | None,
) -> RemoteState:
    tries_left = _TRIES
    while True:
        state = newest_state(objects)
        if state is None:
            raise StoreError("the remote store holds no state yet")
        shutil.rmtree(target, ignore_errors=True)
        try:
            _fetch(objects, state, target, shards, headers_only=headers_only)
            break
        except FileNotFoundError as error:
            # Its writer has removed an object; then there is a newer state.
            tries_left -= 1
            newer = newest_state(objects)
            if not tries_left or newer is None or newer.number == state.number:
                raise DamageError(f"the remote store lacks an object: {error}") from error
    if finish is not None:
        finish(target, state.number, state.writer)
    target.replace(directory)
    sync_directory(directory.parent)
    return state


def _fetch(
    objects: Objects,
    state: RemoteState,
    target: Path,
    shards: Collection[str] | None,
    *,
    headers_only: bool,
) -> None:
    make_directory(target)
    with ThreadPoolExecutor(PARALLEL) as pool:
        for key, (name, record) in state.view.records().items():
            if shards is None or name in shards:
                (target / name).mkdir(exist_ok=True)
                path = target / name / record.file
                checksum = None if headers_only else state.checksums[key]
                _fetch_object(objects, pool, key, record, path, checksum)
    for name, remote in state.view.directories.items():
        (target / name).mkdir(exist_ok=True)
        content = {
            "directory": name,
            "generation": remote.generation,
            "seen": dict(remote.seen),
            "segments": [vars(record) for record in remote.segments],
        }
        write_checksummed(
            target / name / MANIFEST_FILE, "cpr_ext.manifest", content, FORMAT_VERSION
        )
    write_checksummed(target / STORE_FILE, "cpr_ext.store", dict(state.view.model))


def _fetch_object(
    objects: Objects,
    pool: ThreadPoolExecutor,
    key: str,
    record: SegmentRecord,
    path: Path,
    checksum: int | None,
) -> None:
    """Read one object in parallel ranges; ``checksum`` None: its header alone."""
    end = record.file_bytes if checksum is not None else record.header_bytes
    begins = range(0, end, RANGE_BYTES)
    crc = 0
    with os.fdopen(create_anew(path), "wb") as file:
        # So many at a time as there are threads: that bounds the memory.
        for first in range(0, len(begins), PARALLEL):
            group = begins[first : first + PARALLEL]
            read = [
                pool.submit(_read, objects, key, at, min(at + RANGE_BYTES, end)) for at in group
            ]
            for future in read:
                data = future.result()
                crc = native.crc32c(data, crc)
                file.write(data)
        file.truncate(record.file_bytes)
        file.flush()
        os.fsync(file.fileno())
    if checksum is not None and crc != checksum:
        raise DamageError(f"{key}: checksum {crc:08x}, the remote state recorded {checksum:08x}")


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
        with ThreadPoolExecutor(PARALLEL) as pool:
            _fetch_object(objects, pool, key, record, temporary, checksum)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def _read(objects: Objects, key: str, begin: int, end: int) -> bytes:
    for tries_left in reversed(range(_TRIES)):
        try:
            data = objects.read(key, begin, end)
        except FileNotFoundError:
            raise
        except Exception as error:
            if not tries_left:
                raise RemoteError(f"{key}: it could not be read: {brief(error)}") from error
            continue
        if len(data) == end - begin:
            return data
        if not tries_left:
            raise DamageError(f"{key}: {len(data)} bytes came of [{begin}, {end})")
    raise AssertionError("the last try returns or raises")


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
