"""How fast a disk writes and reads, measured with a file of its own that is removed again."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import StorageError

PROBE_BYTES = 256 << 20
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """What the probe saw; ``probe_bytes`` were written and read once."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    probe_bytes: int


def probe_disk(folder: str | os.PathLike[str], *, probe_bytes: int = PROBE_BYTES) -> DiskSpeed:
    """Write and read ``probe_bytes`` in ``folder``, durably and past the page cache.

    Raises:
        StorageError: no file can be written there.
    """
    block = os.urandom(_BLOCK_BYTES)
    num_blocks = max(1, probe_bytes // _BLOCK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=Path(folder), buffering=0) as file:
            started = time.perf_counter()
            for _ in range(num_blocks):
                _write_all(file.fileno(), block)
            os.fsync(file.fileno())
            write_seconds = time.perf_counter() - started
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(_BLOCK_BYTES):
                pass
            read_seconds = time.perf_counter() - started
    except OSError as error:
        raise StorageError(
            error.errno,
            f"the disk of '{folder}' cannot be probed: {error.strerror}. Give its speed instead "
            "(cpr plan --write-mb-per-second --read-mb-per-second)",
            str(folder),
        ) from error
    written = num_blocks * _BLOCK_BYTES
    return DiskSpeed(written / write_seconds, written / read_seconds, written)


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]
