"""The lock of a directory: its holder alone writes there.

It is an advisory lock (``flock``) on a file in the directory. So it also proves that a path still
leads to the directory that was locked.
"""

from __future__ import annotations

import fcntl
import gc
import os
import stat
import time
import weakref
from contextlib import suppress
from pathlib import Path

from cpr_ext.errors import StoreError
from cpr_ext.runtime.forks import Creator, leave_to_parent_when_forked
from cpr_ext.storage.file_names import LOCK_FILE
from cpr_ext.storage.filesystem import open_regular, storage_error

# Between two looks at a lock whose holder has not written its number yet, or may give it back.
_PAUSE_SECONDS = 0.03
_LOOKS = 10
_OWN_SECONDS = 2.0  # a disk may take as long to end the last write of a merge
# A lock file that is removed and made again while it is being locked is tried so often.
_TRIES = 10


class DirectoryLock:
    """The lock of ``directory``, held from construction until :meth:`close`.

    It ends with this process, and when the last reference to this object goes; a forked child does
    not have it.

    Attributes:
        path: the lock file; absolute if ``directory`` is.

    Args:
        directory: which exists.
        may_be_link: the directory may come to be reached through a symbolic link later, as that of
            a whole store may.

    Raises:
        StoreError: somebody else has it; names the process.
        DamageError: in its place is something else than a regular file.
        OSError: the operating system refused.
    """

    def __init__(self, directory: Path, *, may_be_link: bool = True) -> None:
        self.path = directory / LOCK_FILE
        self._may_be_link = may_be_link
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
        try:
            is_there = os.path.samestat(os.lstat(self.path), self._status)
            is_link = not self._may_be_link and stat.S_ISLNK(os.lstat(directory).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_there = is_link = False
        except OSError as error:
            raise storage_error("look for", self.path, error) from error
        if not is_there:
            raise StoreError(
                f"'{directory}' was moved, removed or replaced after this process had opened it "
                f"(its {LOCK_FILE} is another or none). Nothing more is written there, because "
                "another process may. Put the directory back, or start again with its new path"
            )
        if is_link:
            raise StoreError(
                f"'{directory}' was replaced by a symbolic link after this process had opened it. "
                "Nothing more is written there, because links inside a store are not followed when "
                "it is read. Put the directory itself back"
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
