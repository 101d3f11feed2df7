"""The locks of a whole store, for tools that change one that no process trains on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpr_ext.files import storage_error
from cpr_ext.store import lock_directory


@contextmanager
def locked(directories: Sequence[Path]) -> Iterator[None]:
    """Hold the locks of these directories of a store.

    Raises:
        StoreError: a process is training on it (named).
        StorageError: the operating system refused.
    """
    locks: list[int] = []
    try:
        for directory in directories:
            locks.append(_lock(directory))
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _lock(directory: Path) -> int:
    try:
        return lock_directory(directory)
    except OSError as error:
        raise storage_error("lock", directory, error) from error
