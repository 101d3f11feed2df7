"""The locks of a whole store, for tools that change one that no process trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpr_ext.storage.filesystem import storage_error
from cpr_ext.storage.locks import DirectoryLock


@contextmanager
def locked(directories: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of these directories of a store.

    Raises:
        StoreError: a process is training on it (named).
        StorageError: the operating system refused.
    """
    locks: list[DirectoryLock] = []
    try:
        for directory in directories:
            locks.append(_lock(directory))
        yield
    finally:
        for lock in locks:
            lock.close()


def _lock(directory: Path) -> DirectoryLock:
    try:
        return DirectoryLock(directory)
    except OSError as error:
        raise storage_error("lock", directory, error) from error
