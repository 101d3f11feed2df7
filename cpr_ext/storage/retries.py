"""Reads that the operating system refuses: tried again, and never taken for damage.

Damage is bytes that were read and fail their check, or a file that is not there. A file that cannot
be read (EIO, EACCES, EMFILE, ESTALE, a read that ends before the file does) may well be sound. It
raises StorageError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cpr_ext.errors import DamageError, StorageError

T = TypeVar("T")

# Between tries of a read that was refused, in seconds. Tests make them short.
pauses_seconds: tuple[float, ...] = (0.02, 0.1, 0.4, 1.0, 1.5)


def retrying(path: Path, read: Callable[[], T]) -> T:
    """Call ``read``; if the operating system refuses, call it again after each pause.

    Args:
        path: what is read, for the message.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file; not tried again.
        StorageError: it was refused each time.
    """
    for pause in (*pauses_seconds, None):
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            if pause is None:
                raise refusal(path, error) from error
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def list_directory(directory: Path) -> list[Path]:
    """Return the names in a directory, sorted; empty if it does not exist.

    Raises:
        StorageError: it could not be read.
    """
    try:
        return sorted(retrying(directory, lambda: list(directory.iterdir())))
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(path: Path) -> bool:
    """Return whether there is anything of that name, also a link to nothing.

    Raises:
        StorageError: the operating system does not report it.
    """
    try:
        retrying(path, lambda: os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def damage_of(path: Path, result: Mapping[str, Any]) -> DamageError | None:
    """Return what native code found wrong with a segment; None if nothing."""
    return DamageError(f"{path}: {result['damaged'][0][3]}") if result["damaged"] else None


def refusal(path: Path, error: OSError) -> StorageError:
    """Return what is raised for a read that was refused each time."""
    tries, seconds = len(pauses_seconds) + 1, sum(pauses_seconds)
    return StorageError(
        error.errno,
        f"cannot read '{path}': {error.strerror or error} (tried {tries} times in {seconds:.1f} "
        "seconds). It may be sound: make it readable and try again. On a disk that fails, put what "
        "ddrescue can copy of it in its place: recovery then uses older states of the lost rows",
        str(path),
    )
