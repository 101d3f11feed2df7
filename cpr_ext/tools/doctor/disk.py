"""The disk on which stores are to be: direct I/O, its speed, the space that is left."""

from __future__ import annotations

import os
from pathlib import Path

from cpr_ext.errors import StorageError
from cpr_ext.tools.doctor.check import Check
from cpr_ext.tools.maintenance.disk_probe import probe_disk

_SLOW_BYTES_PER_SECOND = 100e6


def check_disk(folder: Path, probe_bytes: int) -> Check:
    """Check that a folder can be written, past the page cache, and measure how fast."""
    try:
        status = os.statvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
        place = f"'{folder}', {free_bytes / 1e9:.1f} GB free"
        if free_bytes < 2 * probe_bytes:
            return Check("disk", "wrong", place, "make room, or name another folder")
        speed = probe_disk(folder, probe_bytes=probe_bytes)
    except OSError as error:
        cause = error.__cause__ if isinstance(error, StorageError) else error
        found = f"'{folder}' cannot be written: {getattr(cause, 'strerror', cause)}"
        return Check("disk", "wrong", found, "name a folder for stores: cpr doctor FOLDER")
    write, read = (
        f"{each / 1e6:,.0f} MB/s"
        for each in (speed.write_bytes_per_second, speed.read_bytes_per_second)
    )
    way = "direct I/O" if speed.is_direct else "no direct I/O, the page cache"
    found = f"{place}; {way} writes {write}, reads {read}"
    if not speed.is_direct:
        remedy = (
            "snapshots pass through the page cache, and push other data out of it; a local ext4 or "
            "xfs disk does better than tmpfs or NFS"
        )
        return Check("disk", "note", found, remedy)
    if speed.write_bytes_per_second < _SLOW_BYTES_PER_SECOND:
        remedy = "see with `cpr bench` whether it suits your model; a faster disk saves more often"
        return Check("disk", "note", found, remedy)
    return Check("disk", "ok", found)
