"""A publication in object storage.

    HEAD                                                 the index
    files/00000012-changed-00000.safetensors.0123abcd    a file, and the CRC32C of its bytes

The index is replaced after all files that it names are there, and only if it is still the one that
was read. So of two publishers one wins, and the other gets an error.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cpr_ext.errors import StoreError
from cpr_ext.storage.checksummed_json import parse_document, serialize_document
from cpr_ext.storage.filesystem import open_regular
from cpr_ext.wings.publishing.publication import FORMAT_NAME, Publication, PublishedFile
from cpr_ext.wings.remote.head import HEAD, PROBES, Head, require_conditional_puts
from cpr_ext.wings.remote.objects import Objects
from cpr_ext.wings.remote.range_reading import WantedFile, read_objects

FILES = "files/"
_CHUNK_BYTES = 1 << 20
_FILE_KEY = re.compile(r"files/(\d{8,})-.*", re.ASCII)


def file_key(file: PublishedFile) -> str:
    """Return the name of a file's object: another content has another one."""
    return f"{FILES}{file.file}.{file.crc32c:08x}"


class RemotePlace:
    """See :class:`cpr_ext.wings.publishing.places.Place`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = name
        self._objects = objects
        self._head = Head(objects)
        self._directory = Path()

    def read_index(self) -> Publication | None:
        """Return the newest index.

        Raises:
            RemoteError: a request failed.
        """
        if (data := self._head.read()) is None:
            return None
        return Publication.from_content(
            parse_document(data, HEAD, FORMAT_NAME), f"{self.name}/{HEAD}"
        )

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Return a temporary directory: files are sent once they are whole."""
        with TemporaryDirectory(prefix="cpr_ext-") as temporary:
            self._directory = Path(temporary)
            yield self._directory

    def begin(self, known: Publication | None) -> None:
        """Refuse a place that holds something else, and a service that would overwrite an index."""
        if known is not None:
            return
        others = [key for key in self._objects.list("") if not key.startswith((FILES, PROBES))]
        if others:
            raise StoreError(
                f"'{self.name}' is no publication but holds {others[0]!r:.100}; choose an "
                "address where nothing is"
            )
        require_conditional_puts(self._objects)

    def add_file(self, file: PublishedFile) -> None:
        """Send a file."""
        path = self._directory / file.file

        def chunks() -> Iterator[bytes]:
            with os.fdopen(open_regular(path), "rb") as opened:
                while chunk := opened.read(_CHUNK_BYTES):
                    yield chunk

        self._objects.write(file_key(file), chunks())
        path.unlink()

    def add_index(self, known: Publication | None, index: Publication) -> None:
        """Replace the index.

        Raises:
            StoreError: another publisher has replaced it.
        """
        if not self._head.replace(serialize_document(FORMAT_NAME, json.dumps(index.to_content()))):
            raise StoreError(f"another process has published to '{self.name}'; end one of the two")
        with suppress(Exception):  # it costs space; the next call tries again
            self._tidy(known, index)

    def _tidy(self, known: Publication | None, index: Publication) -> None:
        named = {
            file_key(file)
            for each in (known, index)
            if each is not None
            for update in each.updates
            for file in update.files
        }
        for key in self._objects.list(FILES):
            match = _FILE_KEY.fullmatch(key)
            # Files of later numbers may be those of a publisher that was faster.
            if key not in named and match is not None and int(match[1]) <= index.number:
                self._objects.delete(key)

    @contextmanager
    def files(self, files: Sequence[PublishedFile]) -> Iterator[Path]:
        """Read files into a temporary directory, in parallel ranges."""
        with TemporaryDirectory(prefix="cpr_ext-") as temporary:
            directory = Path(temporary)
            wanted = [
                WantedFile(file_key(f), directory / f.file, f.file_bytes, f.file_bytes, f.crc32c)
                for f in files
            ]
            try:
                read_objects(self._objects, wanted)
            except FileNotFoundError as error:
                name = error.filename or f"{self.name}: {error}"
                raise FileNotFoundError(errno.ENOENT, "no such object", name) from error
            yield directory
