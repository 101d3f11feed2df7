"""Objects in a directory, such as a mounted disk or NFS: a copy of a store without more packages.

An object is a file. It is written under another name and synced, and a rename gives it its name. A
lock makes a comparison with the file that is there and the rename one step.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpr_ext.errors import RemoteError
from cpr_ext.storage.filesystem import (
    create_anew,
    make_directory,
    open_regular,
    require_all_bytes,
    sync_directory,
)

_TEMPORARY = ".cpr-"  # how names of files begin that are no objects
_LOCK = ".cpr-lock"


class FileObjects:
    """:class:`~cpr_ext.wings.remote.objects.Objects` of a directory, which is made if need be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        """See ``Objects``."""
        with _named("write", key), self._new_file(key, chunks) as (new, path):
            new.replace(path)
            sync_directory(path.parent)

    def read(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """See ``Objects``."""
        with _named("read", key), os.fdopen(open_regular(self._directory / key), "rb") as file:
            file.seek(begin)
            data = file.read() if end is None else file.read(end - begin)
            if end is not None:
                require_all_bytes(file.fileno(), begin + len(data), end)
            return data

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """See ``Objects``; the tag is a digest."""
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def replace(self, key: str, data: bytes, tag: str | None) -> str | None:
        """See ``Objects``."""
        with _named("replace", key), self._new_file(key, [data]) as (new, path):
            lock = open_regular(path.with_name(_LOCK), os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    held: str | None = self.read_tagged(key)[1]
                except FileNotFoundError:
                    held = None
                if held != tag:
                    return None
                new.replace(path)
                sync_directory(path.parent)
            finally:
                os.close(lock)
            return hashlib.sha256(data).hexdigest()

    def list(self, prefix: str) -> list[str]:
        """See ``Objects``."""
        found = []
        with _named("list", prefix):
            for folder, _, names in os.walk(self._directory / prefix, onerror=_raise_unless_gone):
                at = Path(folder).relative_to(self._directory)
                found += [str(at / name) for name in names if not name.startswith(_TEMPORARY)]
        return found

    def delete(self, key: str) -> None:
        """See ``Objects``."""
        with _named("delete", key), suppress(FileNotFoundError):
            (self._directory / key).unlink()

    @contextmanager
    def _new_file(self, key: str, chunks: Iterable[bytes]) -> Iterator[tuple[Path, Path]]:
        """Write a file next to that of an object, and remove it at the end if it is there."""
        path = self._directory / key
        make_directory(path.parent)
        new = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            with os.fdopen(create_anew(new), "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield new, path
        finally:
            new.unlink(missing_ok=True)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _named(request: str, key: str) -> Iterator[None]:
    """Raise errors of the file system as RemoteError that names the request."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and request == "read":
            raise
        text = error.strerror or str(error)
        raise RemoteError(f"the remote store did not {request} '{key}': {text}") from error
