"""Where a publication is: in a directory, or in object storage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from cpr_ext.errors import CprError, StoreError
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.storage.filesystem import make_directory, storage_error, sync_directory
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.retries import list_directory
from cpr_ext.wings.publishing.publication import (
    FORMAT_NAME,
    INDEX_FILE,
    Publication,
    PublishedFile,
    is_file_name,
)
from cpr_ext.wings.publishing.remote_place import RemotePlace
from cpr_ext.wings.remote.opening import RemoteOptions, is_address, open_objects

PublicationPlace = str | os.PathLike[str] | RemoteOptions


class Place(Protocol):
    """Holds one publication.

    Attributes:
        name: how messages name it.
    """

    name: str

    def read_index(self) -> Publication | None:
        """Return the newest index; None: there is none."""

    def opened(self) -> AbstractContextManager[Path]:
        """Return a directory in which a publisher makes files."""

    def begin(self, known: Publication | None) -> None:
        """Prepare for files after ``known``; refuse a place that holds something else."""

    def add_file(self, file: PublishedFile) -> None:
        """Take a file that was made in that directory."""

    def add_index(self, known: Publication | None, index: Publication) -> None:
        """Make ``index`` the newest, after ``known``; then remove files that neither names."""

    def files(self, files: Sequence[PublishedFile]) -> AbstractContextManager[Path]:
        """Return a directory that holds these files; their checksums are yet to be verified."""


def open_place(to: PublicationPlace) -> Place:
    """Return the place of a publication: a directory, or an address such as ``s3://bucket/rows``.

    Raises:
        UsageError: it is an address of no known service.
    """
    if isinstance(to, RemoteOptions):
        return RemotePlace(open_objects(to), to.address)
    if isinstance(to, str) and is_address(to):
        return RemotePlace(open_objects(RemoteOptions(to)), to)
    return DirectoryPlace(Path(to).absolute())


def read_publication(to: PublicationPlace) -> Publication | None:
    """Read the index of a publication; None: there is none.

    Raises:
        DamageError: it is not as written.
        StoreError: it has a version not known here.
        StorageError, RemoteError: it could not be read.
    """
    return open_place(to).read_index()


class DirectoryPlace:
    """See :class:`Place`. The index is replaced as a whole by one rename."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._directory = directory

    def read_index(self) -> Publication | None:
        """Return the index."""
        path = self._directory / INDEX_FILE
        content = read_checksummed(path, FORMAT_NAME)
        return None if content is None else Publication.from_content(content, str(path))

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Return the directory itself, locked."""
        try:
            make_directory(self._directory)
            lock = DirectoryLock(self._directory)
            try:
                yield self._directory
            finally:
                lock.close()
        except OSError as error:
            if isinstance(error, CprError):
                raise
            raise storage_error("publish to", self._directory, error) from error

    def begin(self, known: Publication | None) -> None:
        """Remove files that an interrupted call has left."""
        if known is None:
            self._refuse_strangers()
        self._remove_unlisted(known)

    def add_file(self, file: PublishedFile) -> None:
        """Do nothing: the file is in its place."""

    def add_index(self, known: Publication | None, index: Publication) -> None:
        """Replace the index."""
        sync_directory(self._directory)
        write_checksummed(self._directory / INDEX_FILE, FORMAT_NAME, json.dumps(index.to_content()))
        self._remove_unlisted(known, index)

    @contextmanager
    def files(self, files: Sequence[PublishedFile]) -> Iterator[Path]:
        """Return the directory itself."""
        yield self._directory

    def _refuse_strangers(self) -> None:
        names = [path.name for path in list_directory(self._directory)]
        strangers = [
            name
            for name in names
            if not is_file_name(name) and name not in ("LOCK", "PUBLICATION.json.tmp")
        ]
        if strangers:
            raise StoreError(
                f"'{self._directory}' is no publication but holds {strangers[0]!r}; choose an "
                "empty or a new directory"
            )

    def _remove_unlisted(self, *named_by: Publication | None) -> None:
        updates = [update for index in named_by if index is not None for update in index.updates]
        named = {file.file for update in updates for file in update.files}
        for path in list_directory(self._directory):
            if is_file_name(path.name) and path.name not in named:
                with suppress(OSError):  # it costs space; the next call tries again
                    path.unlink()
