"""Replace a directory as a whole: at every moment its path leads to the old one or the new one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cpr_ext.errors import StoreError
from cpr_ext.storage.filesystem import sync_directory
from cpr_ext.storage.retries import exists

_NEW_SUFFIX = ".filling"  # of the directory that takes the place of another, next to it
_OLD_SUFFIX = ".replaced"  # of the old one, where the two cannot be exchanged by one call
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_WORKING_DIRECTORY = -100
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def replacing(directory: Path, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty directory, which takes the place of ``directory`` once the block ends.

    The old one is removed then. If the block raises, nothing has changed.

    Args:
        directory: which exists; a link is followed, and stays.
        is_ours: whether a directory is what an earlier call has left that was cut off.

    Raises:
        StoreError: it is a mount point, or something else is where the new one is made.
        OSError: the operating system refused.
    """
    directory = Path(os.path.realpath(directory))
    new, aside = _neighbors(directory)
    if os.path.ismount(directory):
        raise StoreError(
            f"'{directory}' is a mount point, which cannot be replaced as a whole. Choose a "
            "directory below it"
        )
    for left in (new, aside):
        if exists(left):
            if not is_ours(left):
                raise StoreError(f"'{left}' is in the way of a new state. Move it away")
            shutil.rmtree(left)
    new.mkdir()
    try:
        yield new
        exchange(new, directory)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_directory(directory.parent)
    shutil.rmtree(new)


def exchange(new: Path, old: Path) -> None:
    """Let two directories exchange their names, by one call if the file system can.

    Where it cannot, such as on NFS, the name of the old one leads nowhere for a moment.

    Raises:
        OSError: the operating system refused.
    """
    try:
        _rename_exchange(new, old)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        _, aside = _neighbors(old)
        old.rename(aside)
        new.rename(old)
        aside.rename(new)


def _rename_exchange(one: Path, other: Path) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, "no renameat2")
    here = _AT_WORKING_DIRECTORY
    if library.renameat2(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))


def put_back(directory: Path) -> None:
    """Put back an old directory, if the process that renamed it has ended between two renames."""
    _, aside = _neighbors(Path(os.path.realpath(directory)))
    if not exists(directory) and exists(aside):
        aside.rename(directory)


def _neighbors(directory: Path) -> tuple[Path, Path]:
    """Return where the new directory is made, and where the old one is for a moment."""
    name = directory.name
    return directory.with_name(name + _NEW_SUFFIX), directory.with_name(name + _OLD_SUFFIX)
