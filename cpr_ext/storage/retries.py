"""Reads that the operating system refuses: tried again, and never taken for damage.

Damage is bytes that were read and fail their check, or a file that is not there. A file that cannot
be read (EIO, EACCES, EMFILE, ESTALE, a read that ends before the file does) may well be sound. It
raises StorageError, unless the user chose that recovery falls back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

from cpr_ext.errors import DamageError, StorageError

T = TypeVar("T")
OnReadError = Literal["raise", "fall_back"]

# Between tries of a read that was refused, in seconds. Tests make them short.
pauses_seconds: tuple[float, ...] = (0.02, 0.1, 0.4, 1.0, 1.5)

# Files that were given up; None: what cannot be read raises.
_given_up: ContextVar[set[str] | None] = ContextVar("cpr_ext_given_up", default=None)


class UnreadableError(DamageError):
    """A segment could not be read, and the user said that recovery is to fall back."""


@contextmanager
def falling_back() -> Iterator[None]:
    """Count segments that cannot be read in the block as damaged: older states are used."""
    token = _given_up.set(set())
    try:
        yield
    finally:
        _given_up.reset(token)


def retrying(path: Path, read: Callable[[], T]) -> T:
    """Call ``read``; if the operating system refuses, call it again after each pause.

    Args:
        path: what is read, for the message.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file; not tried again.
        StorageError: it was refused each time.
    """
    for pause in (*_pauses(path), None):
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


def retrying_segment(path: Path, read: Callable[[], T]) -> T:
    """Return the same of a segment, for which the user may have said that recovery is to fall back.

    Raises:
        StorageError: it was refused each time.
        UnreadableError: the same, inside :func:`falling_back`.
    """
    try:
        return retrying(path, read)
    except StorageError as error:
        if (given_up := _given_up.get()) is None:
            raise
        given_up.add(str(path))
        raise UnreadableError(str(error)) from error


def native_read_errors(*paths: Path) -> dict[str, Any]:
    """Return the same for native code that reads these segments, as its keyword arguments."""
    pauses = () if all(map(_is_given_up, paths)) else pauses_seconds
    return {"pauses_seconds": list(pauses), "unreadable_is_damage": _given_up.get() is not None}


def damage_of(path: Path, result: Mapping[str, Any]) -> DamageError | None:
    """Return what native code found wrong with a segment; None if nothing."""
    if not result["damaged"]:
        return None
    text = f"{path}: {result['damaged'][0][3]}"
    if not result["chunks_unreadable"]:
        return DamageError(text)
    if (given_up := _given_up.get()) is not None:
        given_up.add(str(path))
    return UnreadableError(text)


def _is_given_up(path: Path) -> bool:
    given_up = _given_up.get()
    return given_up is not None and str(path) in given_up


def _pauses(path: Path) -> tuple[float, ...]:
    """Do not wait again for a file that stayed unreadable: a recovery waits for each file once."""
    return () if _is_given_up(path) else pauses_seconds


def refusal(path: Path, error: OSError) -> StorageError:
    """Return what is raised for a read that was refused each time."""
    tries, seconds = len(pauses_seconds) + 1, sum(pauses_seconds)
    return StorageError(
        error.errno,
        f"cannot read '{path}': {error.strerror or error} (tried {tries} times in {seconds:.1f} "
        "seconds). It may be sound: make it readable and try again",
        str(path),
    )
