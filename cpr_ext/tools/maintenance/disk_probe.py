"""How fast a disk writes and reads, as snapshots are written: past the page cache, durably."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import StorageError

PROBE_BYTES = 256 << 20
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """What the probe saw; ``probe_bytes`` were written and read once.

    ``is_direct``: past the page cache; False: the file system refuses that, to snapshots too.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    probe_bytes: int
    is_direct: bool


def probe_disk(folder: str | os.PathLike[str], *, probe_bytes: int = PROBE_BYTES) -> DiskSpeed:
    """Write and read ``probe_bytes`` in a file of ``folder`` that is removed again.

    Raises:
        StorageError: no file can be written there.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix="cpr_probe.", dir=folder)
        os.close(descriptor)
        try:
            return _probe(name, max(1, probe_bytes // _BLOCK_BYTES))
        finally:
            Path(name).unlink()
    except OSError as error:
        raise StorageError(
            error.errno,
            f"the disk of '{folder}' cannot be probed: {error.strerror}. Give its speed instead "
            "(cpr plan --write-mb-per-second --read-mb-per-second)",
            str(folder),
        ) from error


def _probe(name: str, num_blocks: int) -> DiskSpeed:
    descriptor, is_direct = _open(name)
    total = num_blocks * _BLOCK_BYTES
    try:
        # Aligned to pages, as direct I/O needs. It goes with its last view: an interrupt has some.
        view = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        view[:] = os.urandom(_BLOCK_BYTES)
        with suppress(OSError):  # snapshots reserve their bytes, where that is possible
            os.posix_fallocate(descriptor, 0, total)
        started = time.perf_counter()
        for number in range(num_blocks):
            _all(os.pwritev, descriptor, view, number * _BLOCK_BYTES)
        os.fsync(descriptor)
        write_seconds = time.perf_counter() - started
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for number in range(num_blocks):
            _all(os.preadv, descriptor, view, number * _BLOCK_BYTES)
        read_seconds = time.perf_counter() - started
    finally:
        os.close(descriptor)
    return DiskSpeed(total / write_seconds, total / read_seconds, total, is_direct)


def _open(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(name, os.O_RDWR), False


def _all(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    view: memoryview,
    offset: int,
) -> None:
    """Repeat a call that may stop early, until the block is done."""
    done = 0
    while done < len(view):
        count = call(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        done += count
