"""A publication in object storage.

    index/000000000012.json                              the newest index has the highest number
    files/00000012-changed-00000.safetensors.0123abcd    a file, and the CRC32C of its bytes

An index is created after all files that it names, and only if there is none of its number. So of
two publishers one wins, and the other gets an error.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cpr_ext.errors import StoreError
from cpr_ext.storage.checksummed_json import parse_document, serialize_document
from cpr_ext.storage.filesystem import open_regular
from cpr_ext.storage.remote.numbered import (
    document_key,
    document_numbers,
    newest_document,
    require_create_only,
)
from cpr_ext.storage.remote.objects import Objects
from cpr_ext.storage.remote.range_reading import WantedFile, read_objects
from cpr_ext.tools.publishing.publication import FORMAT_NAME, Publication, PublishedFile

INDEXES = "index/"
FILES = "files/"
INDEXES_KEPT = 16  # old ones: small
_CHUNK_BYTES = 1 << 20
_FILE_KEY = re.compile(r"files/(\d{8,})-.*", re.ASCII)


def file_key(file: PublishedFile) -> str:
    """Return the name of a file's object: another content has another one."""
    return f"{FILES}{file.file}.{file.crc32c:08x}"


class RemotePlace:
    """See :class:`cpr_ext.tools.publishing.places.Place`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self.name = name
        self._objects = objects
        self._directory = Path()

    def read_index(self) -> Publication | None:
        """Return the newest index.

        Raises:
            RemoteError: a request failed.
        """
        found = newest_document(self._objects, INDEXES)
        if found is None:
            return None
        key = document_key(INDEXES, found[0])
        content = parse_document(found[1], key, FORMAT_NAME)
        return Publication.from_content(content, f"{self.name}/{key}")

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
        ours = (INDEXES, FILES, "probes/")
        strangers = [key for key in self._objects.list("") if not key.startswith(ours)]
        if strangers:
            raise StoreError(
                f"'{self.name}' is no publication but holds {strangers[0]!r:.100}; choose an "
                "address where nothing is"
            )
        require_create_only(self._objects)

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
        """Create the next index.

        Raises:
            StoreError: another publisher has created it.
        """
        key = document_key(INDEXES, index.number)
        data = serialize_document(FORMAT_NAME, index.to_content())
        # One that is there may be ours: a request can arrive twice.
        is_ours = self._objects.create(key, data) or self._objects.read(key) == data
        # Others may have published so often meanwhile that this number was free again.
        if not is_ours or document_numbers(self._objects, INDEXES)[-1:] > [index.number]:
            if is_ours:
                self._objects.delete(key)
            raise StoreError(
                f"another process has published to '{self.name}' ({key}); end one of the two"
            )
        with suppress(Exception):  # it costs space; the next call tries again
            self._tidy(known, index)

    def _tidy(self, known: Publication | None, index: Publication) -> None:
        for number in document_numbers(self._objects, INDEXES)[:-INDEXES_KEPT]:
            self._objects.delete(document_key(INDEXES, number))
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
