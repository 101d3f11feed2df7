"""The disk on which stores are to be: direct I/O, its speed, the space that is left."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

from cpr_ext.doctor.check import Check

_BLOCK_BYTES = 8 << 20
_SLOW_BYTES_PER_SECOND = 100e6


def check_disk(folder: Path, probe_bytes: int) -> Check:
    """Check that a folder can be written, past the page cache, and measure how fast."""
    try:
        free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        descriptor, name = tempfile.mkstemp(prefix="cpr_doctor.", dir=folder)
    except OSError as error:
        found = f"'{folder}' cannot be written: {error.strerror}"
        return Check("disk", "wrong", found, "name a folder for stores: cpr doctor FOLDER")
    os.close(descriptor)
    place = f"'{folder}', {free_bytes / 1e9:.1f} GB free"
    if free_bytes < 2 * probe_bytes:
        Path(name).unlink()
        return Check("disk", "wrong", place, "make room, or name another folder")
    try:
        speeds = measure_direct(name, probe_bytes)
    except OSError as error:
        found = f"{place}; direct I/O fails: {error.strerror}"
        remedy = (
            "snapshots pass through the page cache, and push other data out of it; a local ext4 or "
            "xfs disk does better than tmpfs or NFS"
        )
        return Check("disk", "note", found, remedy)
    finally:
        Path(name).unlink()
    write, read = (f"{speed / 1e6:,.0f} MB/s" for speed in speeds)
    found = f"{place}; direct I/O writes {write}, reads {read}"
    if speeds[0] < _SLOW_BYTES_PER_SECOND:
        remedy = "see with `cpr bench` whether it suits your model; a faster disk saves more often"
        return Check("disk", "note", found, remedy)
    return Check("disk", "ok", found)


def measure_direct(name: str, probe_bytes: int) -> tuple[float, float]:
    """Write and read a file with ``O_DIRECT``; return bytes per second of both.

    Raises:
        OSError: the file system takes no direct I/O, or refuses to write.
    """
    num_blocks = max(1, probe_bytes // _BLOCK_BYTES)
    descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned to pages, as direct I/O needs
            block.write(os.urandom(_BLOCK_BYTES))
            view = memoryview(block)
            started = time.perf_counter()
            for number in range(num_blocks):
                _all(os.pwritev, descriptor, view, number * _BLOCK_BYTES)
            os.fsync(descriptor)
            written = time.perf_counter()
            for number in range(num_blocks):
                _all(os.preadv, descriptor, view, number * _BLOCK_BYTES)
            read = time.perf_counter()
            view.release()
    finally:
        os.close(descriptor)
    total = num_blocks * _BLOCK_BYTES
    return total / (written - started), total / (read - written)


def _all(call: object, descriptor: int, view: memoryview, offset: int) -> None:
    """Repeat a call that may stop early, until the block is done."""
    assert callable(call)
    done = 0
    while done < len(view):
        count = call(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(5, "the file ends early")
        done += count
