"""Locks of a store's directory, held by its one writer, and leases, held by its readers."""

from __future__ import annotations

import fcntl
import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpr_ext.errors import StoreError
from cpr_ext.runtime.forks import Creator, leave_to_parent_when_forked
from cpr_ext.storage.file_names import LOCK_FILE
from cpr_ext.storage.filesystem import open_regular, storage_error

# Between two looks at a lock whose holder has not written its number yet, or may give it back.
_PAUSE_SECONDS = 0.03
_LOOKS = 10
_OWN_SECONDS = 2.0  # a disk may take as long to end the last write of a snapshot
# A lock file that is removed and made again while it is being locked is tried so often.
_TRIES = 10


class DirectoryLock:
    """The lock of ``directory``, held from construction until :meth:`close`.

    It ends with this process, and when the last reference to this object goes; a forked child does
    not have it.

    Attributes:
        path: the lock file; absolute if ``directory`` is.

    Args:
        directory: which exists; it may come to be reached through a symbolic link later.

    Raises:
        StoreError: somebody else has it; names the process.
        DamageError: in its place is something else than a regular file.
        OSError: the operating system refused.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK_FILE
        self._creator = Creator()
        self._descriptor, self._status = _take(self.path)
        # Not at exit: threads may still write then, and the system gives the lock back.
        self._finalizer = weakref.finalize(self, _close_quietly, self._descriptor)
        self._finalizer.atexit = False
        leave_to_parent_when_forked(self)

    def require_in_place(self) -> None:
        """Raise unless the path still leads to the directory whose lock this process has.

        Raises:
            StoreError: the directory was moved, removed or replaced, or its lock file was.
            StorageError: the operating system does not say.
            UsageError: this is a forked child.
        """
        self._creator.require("store")
        directory = self.path.parent
        if not self._finalizer.alive:
            raise StoreError(f"'{directory}' is closed; its lock was given back")
        require_same(
            self.path,
            self._status,
            f"'{directory}' was moved, removed or replaced after this process had opened it (its "
            f"{LOCK_FILE} is another or none)",
        )

    def close(self) -> None:
        """Give the lock back; closing twice is fine.

        Raises:
            OSError: the operating system reports an error; the lock is given back all the same.
        """
        if self._finalizer.detach() is not None:
            os.close(self._descriptor)

    def leave_to_parent(self) -> None:
        """Close what a forked child has inherited, so that the lock ends with the parent."""
        if self._finalizer.detach() is not None:
            _close_quietly(self._descriptor)


def require_same(path: Path, status: os.stat_result, otherwise: str) -> None:
    """Raise StoreError unless ``path`` leads, without a link, to the file or directory of a status.

    Raises:
        StorageError: the operating system does not say.
    """
    try:
        is_same = os.path.samestat(os.lstat(path), status)
    except (FileNotFoundError, NotADirectoryError):
        is_same = False
    except OSError as error:
        raise storage_error("look for", path, error) from error
    if not is_same:
        raise StoreError(
            f"{otherwise}. Nothing more is written there, because another process may. Put the "
            "directory back, or start again with its new path"
        )


def _close_quietly(descriptor: int) -> None:
    with suppress(OSError):
        os.close(descriptor)


def _take(path: Path) -> tuple[int, os.stat_result]:
    """Lock the file at ``path``, write this process's number into it; its descriptor and status."""
    for _ in range(_TRIES):
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(path, descriptor)
            if _is_at(path, descriptor):
                status = os.fstat(descriptor)
                if status.st_nlink == 1:
                    number = f"{os.getpid()}\n".encode()
                    os.pwrite(descriptor, number, 0)
                    os.ftruncate(descriptor, len(number))
                    return descriptor, status
                # Its bytes are another name's, too, as after `cp -al`, perhaps of a file outside
                # the store. They stay as they are, and this name gets a file of its own.
                path.unlink()
        except BaseException:
            _close_quietly(descriptor)
            raise
        os.close(descriptor)  # it was removed meanwhile
    raise StoreError(f"'{path.parent}' is removed and made again all the time; end who does that")


def _lock(path: Path, descriptor: int) -> None:
    if _try_lock(descriptor):
        return
    holder = _read_holder(descriptor)
    if holder == os.getpid():
        gc.collect()  # an object that nobody can reach any more may have it,
        deadline = time.monotonic() + _OWN_SECONDS
        while time.monotonic() < deadline:  # or a thread that ends what such an object has begun
            if _try_lock(descriptor):
                return
            time.sleep(_PAUSE_SECONDS)
    raise StoreError(f"'{path.parent}' is being written by {_describe(holder)}")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> int | None:
    """Return the process that the lock file names; None if it names none."""
    number = None
    for look in range(_LOOKS):
        time.sleep(_PAUSE_SECONDS if look else 0)
        text = os.pread(descriptor, 32, 0)
        number = int(text) if text.strip().isdigit() else None
        if number is not None and _is_alive(number):
            return number  # else the new holder may be about to write its own
    return number


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _describe(holder: int | None) -> str:
    if holder is None:
        return "another process, which has not said yet which it is; end it, or try again"
    if holder == os.getpid():
        return (
            f"this same process {holder}, by another Checkpointer; close() that one first, or "
            "choose another directory"
        )
    if not _is_alive(holder):
        return (
            f"process {holder} or one that it has started: no process here has that number now. "
            "End those it has started; or it runs in another container or on another machine. Or "
            "choose another directory"
        )
    return f"process {holder}; end it, or choose another directory"


# How long the removal of a file waits for readers.
WAIT_SECONDS = 600.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LEASE_TRIES = 20  # a writer that asks holds the lock for some microseconds


@contextmanager
def reader_lease(store: Path) -> Iterator[None]:
    """Keep writers from removing files of the store in the block, for a bounded time.

    Where no lock is to be had it goes without.
    """
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(store, _DIRECTORY)
        _lock_shared(descriptor)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock_shared(descriptor: int) -> None:
    for _ in range(_LEASE_TRIES):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
    return None


def has_readers(store: Path) -> bool:
    """Return whether a reader holds a lease; False also if the system does not report it."""
    try:
        descriptor = os.open(store, _DIRECTORY)
    except OSError:
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
