"""The only functions by which Python opens files of a store.

A store may be untrusted: whatever its file names are, only regular files and real directories
inside it are touched. The store's own directory may be reached through symbolic links; nothing in
it may be one. Native code does the same (``csrc/storage/file.cpp``).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from cpr_ext.errors import DamageError, StorageError

# A pipe must not hang whoever opens it, and a terminal must not become this process's own.
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; with ``O_CREAT`` in ``flags`` it is made if there is none.

    Returns:
        The descriptor, for the caller to close.

    Raises:
        DamageError: it is something else, such as a symbolic link, a pipe or a directory.
        OSError: the operating system refused; FileNotFoundError: there is no such file.
    """
    try:
        descriptor = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        # ENXIO: a pipe without a reader, or a socket.
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise DamageError(f"{path}: not a regular file, which is all a store holds") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamageError(f"{path}: not a regular file, which is all a store holds")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_anew(path: Path) -> int:
    """Make a file that does not exist and open it for writing; a link in its place is no way out.

    Raises:
        OSError: the operating system refused; FileExistsError: there is something of that name.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666)


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        DamageError: it is no regular file, or larger than ``max_bytes``.
        OSError: the operating system refused; FileNotFoundError: there is no such file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > max_bytes:
            raise DamageError(f"{path}: {size_bytes} bytes; at most {max_bytes} are allowed")
        data = file.read()
        require_all_bytes(file.fileno(), len(data), size_bytes)
        return data


def require_all_bytes(descriptor: int, got: int, wanted: int) -> None:
    """Raise OSError if a read came to an end before the file does."""
    if got < wanted and os.fstat(descriptor).st_size >= wanted:
        raise OSError(errno.EIO, f"{got} of {wanted} bytes came, though the file is longer")


def require_directory(directory: Path) -> None:
    """Raise DamageError unless ``directory`` is one, and no symbolic link to one.

    Raises:
        FileNotFoundError: there is nothing of that name.
    """
    if not stat.S_ISDIR(os.lstat(directory).st_mode):
        raise DamageError(f"{directory}: not a directory; links are not followed inside a store")


def sync_directory(directory: Path) -> None:
    """Make the entries of ``directory`` durable."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error("sync", directory, error) from error


def make_directory(directory: Path) -> None:
    """Make ``directory`` and its parents, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing or [directory]:
        sync_directory(path.parent)


def storage_error(operation: str, path: Path, error: OSError) -> StorageError:
    """Return ``error`` as this library raises it, with the call and its file."""
    return StorageError(
        error.errno, f"cannot {operation} '{path}': {error.strerror or error}", str(path)
    )
