"""Who holds an advisory lock, from /proc: the process that took it may be gone.

A lock of ``flock`` belongs to an open file, and lasts as long as any process has that file open.
Children of the process that took it may keep it after its death.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def lock_holders(path: Path) -> list[int]:
    """Return the processes of this machine that hold a lock on ``path``, as far as we may see."""
    with contextlib.suppress(OSError):
        wanted = path.stat()
        return sorted(pid for pid in _processes() if _holds(pid, (wanted.st_dev, wanted.st_ino)))
    return []


def describe_holders(path: Path, taken_by: str) -> str:
    """Say who holds the lock on ``path``, as a clause.

    Args:
        taken_by: process number that the lock file names; may be empty or of a dead process.
    """
    holders = lock_holders(path)
    names = ", ".join(map(str, holders))
    if taken_by in map(str, holders):
        return f"is still process {taken_by}"
    if holders:
        return f"is gone, but what it started still holds its lock: process {names}"
    return f"is perhaps still process {taken_by or 'unknown'}, which is not seen from this machine"


def _processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            yield int(entry.name)


def _holds(pid: int, wanted: tuple[int, int]) -> bool:
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == wanted and _is_locked(pid, descriptor.name):
                    return True
    return False


def _is_locked(pid: int, descriptor: str) -> bool:
    return "FLOCK" in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
