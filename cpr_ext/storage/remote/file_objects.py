"""Objects in a directory, such as a mounted disk or NFS: a copy of a store without more packages.

An object is a file. It is written under another name and synced. A hard link gives it its name,
which fails if there is one of it; or a rename, which replaces that.
"""

from __future__ import annotations

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

_TEMPORARY = ".cpr-"  # how names of files begin that are being written


class FileObjects:
    """:class:`~cpr_ext.storage.remote.objects.Objects` of a directory, which is made if need be."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, key: str, data: bytes) -> bool:
        """See ``Objects``."""
        with _named("create", key), self._new_file(key, [data]) as (new, path):
            try:
                os.link(new, path, follow_symlinks=False)
            except FileExistsError:
                return False
            sync_directory(path.parent)
            return True

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
