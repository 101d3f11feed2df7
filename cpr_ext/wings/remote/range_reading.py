"""Read objects into files, in ranges that are read in parallel.

All objects share one window of ranges, so a small object does not make the others wait.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cpr_ext._native import native
from cpr_ext.errors import DamageError, RemoteError
from cpr_ext.storage.filesystem import create_anew
from cpr_ext.wings.remote.objects import Objects, brief

RANGE_BYTES = 8 << 20
PARALLEL = 8
WINDOW = 2 * PARALLEL  # so many ranges are in memory at most
_WRITERS = 2
FIRST_PAUSE_SECONDS = 0.1  # after a request that failed; twice as long each time
_TRIES = 5


@dataclass(frozen=True)
class WantedFile:
    """A file to make of an object.

    Attributes:
        end: where the bytes end that are read; 0 is no object's end.
        file_bytes: the file's size; bytes after ``end`` are a hole.
        checksum: CRC32C of the bytes read; None: it is not known.
    """

    key: str
    path: Path
    end: int
    file_bytes: int
    checksum: int | None


class _OpenFile:
    def __init__(self, wanted: WantedFile) -> None:
        self._wanted = wanted
        self._descriptor = create_anew(wanted.path)
        self._left = -(-wanted.end // RANGE_BYTES)  # ranges that are not written yet
        self._counting = Lock()
        self._crc = 0
        self._bytes = 0

    def read(self, objects: Objects, begin: int, end: int) -> bytes:
        """Read a range; any thread may."""
        return _read(objects, self._wanted.key, begin, end)

    def note(self, data: bytes) -> None:
        """Take note of the next range.

        Raises:
            DamageError: the object is not as written.
        """
        wanted = self._wanted
        self._crc = native.crc32c(data, self._crc)
        self._bytes += len(data)
        if self._bytes < wanted.end:
            return
        if wanted.checksum is not None and self._crc != wanted.checksum:
            raise DamageError(
                f"{wanted.key}: checksum {self._crc:08x}, the remote state recorded "
                f"{wanted.checksum:08x}"
            )

    def write(self, data: bytes, begin: int) -> None:
        """Write a range durably, while others are read; the last one closes the file."""
        at = 0
        while at < len(data):
            at += os.pwrite(self._descriptor, memoryview(data)[at:], begin + at)
        os.fdatasync(self._descriptor)
        with self._counting:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._make_hole()
            os.fsync(self._descriptor)
            self.close()

    def _make_hole(self) -> None:
        wanted = self._wanted
        try:
            os.ftruncate(self._descriptor, wanted.file_bytes)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise DamageError(
                f"{wanted.key}: the remote state recorded {wanted.file_bytes} bytes, more than a "
                "file here can have"
            ) from error

    def close(self) -> None:
        """Close the file; it may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def read_objects(objects: Objects, wanted: Iterable[WantedFile]) -> None:
    """Make files of objects, durably but for their directory entries.

    Raises:
        DamageError: an object is not as written.
        FileNotFoundError: there is no such object.
        RemoteError: a request failed again and again.
        OSError: a file could not be written.
    """
    opened: list[_OpenFile] = []
    reading: deque[tuple[_OpenFile, int, Future[bytes]]] = deque()
    writing: deque[Future[None]] = deque()
    with (
        ThreadPoolExecutor(PARALLEL, thread_name_prefix="cpr_ext-fetch") as readers,
        ThreadPoolExecutor(_WRITERS, thread_name_prefix="cpr_ext-keep") as writers,
    ):

        def take_oldest() -> None:
            file, begin, read = reading.popleft()
            data = read.result()
            file.note(data)
            writing.append(writers.submit(file.write, data, begin))

        try:
            for file, begin, end in _ranges(wanted, opened):
                while len(reading) + len(writing) >= WINDOW:
                    if writing and (writing[0].done() or len(reading) <= PARALLEL):
                        writing.popleft().result()
                    else:
                        take_oldest()
                reading.append((file, begin, readers.submit(file.read, objects, begin, end)))
            while reading:
                take_oldest()
            while writing:
                writing.popleft().result()
        finally:
            for pool in (readers, writers):
                pool.shutdown(cancel_futures=True)
            for file in opened:
                file.close()


def _ranges(
    wanted: Iterable[WantedFile], opened: list[_OpenFile]
) -> Iterator[tuple[_OpenFile, int, int]]:
    for each in wanted:
        file = _OpenFile(each)
        opened.append(file)
        for begin in range(0, each.end, RANGE_BYTES):
            yield file, begin, min(begin + RANGE_BYTES, each.end)


def _read(objects: Objects, key: str, begin: int, end: int) -> bytes:
    pause = FIRST_PAUSE_SECONDS
    for tries_left in reversed(range(_TRIES)):
        try:
            data = objects.read(key, begin, end)
        except FileNotFoundError:
            raise
        except Exception as error:
            if not tries_left:
                raise RemoteError(f"{key}: it could not be read: {brief(error)}") from error
        else:
            if len(data) == end - begin:
                return data
            if not tries_left:
                raise DamageError(f"{key}: {len(data)} bytes came of [{begin}, {end})")
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last try returns or raises")
