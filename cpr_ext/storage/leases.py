"""Leases of readers: a superseded file is not removed during a read.

A reader holds a shared lock on STORE.json. A writer that is about to remove files checks for such a
lock, and waits for a bounded time. Both only read the file, so that a reader needs no right to
write. Where locks do not reach (another machine, a file system without them), a reader whose files
vanish begins again; see :func:`cpr_ext.storage.store_reader.read_committed`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpr_ext.errors import DamageError
from cpr_ext.storage.file_names import STORE_FILE
from cpr_ext.storage.filesystem import open_regular

# How long the removal of a file waits for readers.
WAIT_SECONDS = 600.0
_TRIES = 20  # a writer that asks holds the lock for some microseconds


@contextmanager
def reader_lease(store: Path) -> Iterator[None]:
    """Keep writers from removing files of the store in the block, for a bounded time.

    Where no lock is to be had it goes without.
    """
    descriptor = -1
    with suppress(OSError, DamageError):
        descriptor = open_regular(store / STORE_FILE)
        _lock_shared(descriptor)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock_shared(descriptor: int) -> None:
    for _ in range(_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
    return None


def has_readers(store: Path) -> bool:
    """Return whether a reader holds a lease; False also if the system does not report it."""
    try:
        descriptor = open_regular(store / STORE_FILE)
    except (OSError, DamageError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
