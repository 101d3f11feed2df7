"""The disk on which stores are to be: whether it takes direct I/O, and the space that is left."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

from cpr_ext.wings.tools.doctor.check import Check

_BLOCK_BYTES = 4096


def check_disk(folder: Path) -> Check:
    """Check that a folder can be written, and past the page cache."""
    try:
        is_direct = _write_block(folder)
        status = os.statvfs(folder)
    except OSError as error:
        found = f"'{folder}' cannot be written: {error.strerror}"
        return Check("disk", "wrong", found, "name a folder for stores: cpr doctor FOLDER")
    place = f"'{folder}', {status.f_bavail * status.f_frsize / 1e9:.1f} GB free"
    if is_direct:
        return Check("disk", "ok", f"{place}; direct I/O")
    remedy = (
        "snapshots pass through the page cache, and push other data out of it; a local ext4 or "
        "xfs disk does better than tmpfs or NFS"
    )
    return Check("disk", "note", f"{place}; no direct I/O, the page cache", remedy)


def _write_block(folder: Path) -> bool:
    """Write a block durably in a file that is removed again; False: only by the page cache."""
    descriptor, name = tempfile.mkstemp(prefix="cpr_doctor.", dir=folder)
    os.close(descriptor)
    try:
        descriptor, is_direct = _open(name)
        try:
            os.write(descriptor, mmap.mmap(-1, _BLOCK_BYTES))  # aligned, as direct I/O needs it
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        Path(name).unlink()
    return is_direct


def _open(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(name, os.O_RDWR), False
