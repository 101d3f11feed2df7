"""Make a directory the store of a state that is read from elsewhere, by one rename.

A new store is filled in place: it may be a mount point or a link. A new directory replaces a store
that is an earlier state of the same. It has links to the files of both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cpr_ext.errors import CprError, StoreError
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed
from cpr_ext.storage.file_names import (
    DENSE_DIRECTORY,
    FETCHING_FILE,
    MANIFEST_FILE,
    STORE_FILE,
    is_own_name,
    is_store_directory,
    names_in_the_way,
)
from cpr_ext.storage.filesystem import make_directory, storage_error, sync_directory
from cpr_ext.storage.locks import DirectoryLock
from cpr_ext.storage.manifest import FORMAT_NAME, SegmentRecord
from cpr_ext.storage.remote.remote_state import RemoteDirectory, StoreView, local_view
from cpr_ext.storage.replacing import put_back, replacing
from cpr_ext.storage.retries import exists, list_directory
from cpr_ext.storage.store_reader import StoreReader


class LackingFile(NamedTuple):
    """A segment that a directory lacks, and the file to make of it."""

    directory: str
    record: SegmentRecord
    path: Path


Read = Callable[[Sequence[LackingFile]], None]


class Filling:
    """A directory that becomes a store once its block ends.

    Attributes:
        target: the directory that is filled.
        held: the committed state of the store that it replaces; None: there is none.
        read: the segments that were read so far.
    """

    def __init__(self, target: Path, replaced: Path | None) -> None:
        self.target = target
        self.held = None if replaced is None else local_view(StoreReader(replaced))
        self.read: set[tuple[str, SegmentRecord]] = set()
        self._replaced = replaced
        self._linked: set[tuple[str, SegmentRecord]] = set()

    def fill(self, view: StoreView, read: Read, directories: Collection[str] | None = None) -> None:
        """Put in the segments and manifests of a state; again, if another state is newer.

        Args:
            read: makes the files that are lacking, durably; :meth:`note_read` keeps one for later
                calls.
            directories: whose segments are read; None: of all.

        Raises:
            StoreError: the store that is replaced is no earlier state of this one.
            FileNotFoundError: a segment was removed from where it is read.
        """
        self._require_descent(view)
        write_checksummed(self.target / FETCHING_FILE, "cpr_ext.store", dict(view.model))
        records = [
            (name, record)
            for name, record in view.records().values()
            if directories is None or name in directories
        ]
        self._remove_all_but(records)
        for name in view.directories:
            (self.target / name).mkdir(exist_ok=True)
        held = self.read | self._linked
        lacking = [each for each in records if each not in held and not self._link(*each)]
        with ThreadPoolExecutor(1) as pool:  # the disk does this while what is read is waited for
            manifests = pool.submit(write_manifests, self.target, view)
            read([LackingFile(name, record, self._path(name, record)) for name, record in lacking])
            manifests.result()
        self.read |= set(lacking)
        _keep_time(self.target, view)
        for name in view.directories:
            sync_directory(self.target / name)  # names of segments that came after its manifest

    def note_read(self, wanted: LackingFile) -> None:
        """Keep a file that was read, also if others are gone and a newer state is taken."""
        self.read.add((wanted.directory, wanted.record))

    def finish(self) -> None:
        """Make it a store."""
        sync_directory(self.target)
        (self.target / FETCHING_FILE).replace(self.target / STORE_FILE)
        sync_directory(self.target)

    def _path(self, name: str, record: SegmentRecord) -> Path:
        return self.target / name / record.file

    def _require_descent(self, view: StoreView) -> None:
        held = self.held
        if held is None or (held.store_id == view.store_id and view.descends_from(held)):
            return
        raise StoreError(
            f"'{self._replaced}' holds step {held.step} of "
            + ("another store" if held.store_id != view.store_id else "this store")
            + f", and the state to put there (step {view.step}) does not follow from it. Choose "
            "another directory; or remove this one, if nobody needs what is in it"
        )

    def _remove_all_but(self, records: Collection[tuple[str, SegmentRecord]]) -> None:
        """Remove what a fill before this one has left and this state lacks, or what is half."""
        wanted = {self._path(*each) for each in records if each in self.read | self._linked}
        for directory in list_directory(self.target):
            if is_store_directory(directory.name):
                for path in list_directory(directory):
                    if path not in wanted:
                        path.unlink()
        self.read &= set(records)
        self._linked &= set(records)

    def _link(self, name: str, record: SegmentRecord) -> bool:
        """Take a file of the store that is replaced; False: it has none, or there are no links."""
        if self._replaced is None or self.held is None:
            return False
        if record not in self.held.directories.get(name, _NOTHING).segments:
            return False
        try:
            os.link(self._replaced / name / record.file, self._path(name, record))
        except OSError:
            return False
        self._linked.add((name, record))
        return True


_NOTHING = RemoteDirectory(0, "", (), {}, ())


@contextmanager
def filling(directory: Path, *, may_replace: bool = False) -> Iterator[Filling]:
    """Fill a directory in the block. If that raises, the directory is as before.

    Args:
        directory: empty or missing; with ``may_replace`` also a store on which nobody trains.

    Raises:
        StoreError: it holds something else, or another process writes there.
        StorageError: it could not be written.
    """
    directory = directory.absolute()
    try:
        if may_replace:
            put_back(directory)
        if may_replace and exists(directory / STORE_FILE):
            with _replaced(directory) as target:
                filled = Filling(target, directory)
                yield filled
                filled.finish()
            return
        make_directory(directory)
        lock = DirectoryLock(directory)
        try:
            require_vacant(directory)
            clear(directory)
            try:
                filled = Filling(directory, None)
                yield filled
                filled.finish()
            except BaseException:
                clear(directory)
                raise
        finally:
            lock.close()
    except OSError as error:
        if isinstance(error, CprError):
            raise
        raise storage_error("fill", directory, error) from error


@contextmanager
def _replaced(directory: Path) -> Iterator[Path]:
    """Lock a store, and yield the directory that takes its place."""
    others = [path.name for path in list_directory(directory) if not is_own_name(path.name)]
    if others:
        raise StoreError(
            f"'{directory}' holds {others[0]!r:.100}, which is of no store and would be lost. "
            "Choose another directory"
        )
    with ExitStack() as locks:
        held = [path for path in list_directory(directory) if is_store_directory(path.name)]
        for each in (directory, *held):
            locks.callback(DirectoryLock(each).close)
        with replacing(directory, lambda path: _is_left_of(path, directory)) as target:
            yield target


def _is_left_of(path: Path, directory: Path) -> bool:
    """Return whether a directory next to a store is of an earlier call that was cut off."""
    with suppress(StoreError):
        wanted = read_checksummed(directory / STORE_FILE, "cpr_ext.store")
        for name in (STORE_FILE, FETCHING_FILE):
            found = read_checksummed(path / name, "cpr_ext.store")
            if found is not None:
                return wanted is not None and found["store_id"] == wanted["store_id"]
    return not list_directory(path)


def require_vacant(directory: Path) -> None:
    """Raise StoreError if a directory holds anything that a new store does not begin with."""
    if found := names_in_the_way(path.name for path in list_directory(directory)):
        raise StoreError(
            f"'{directory}' holds {found[0]!r:.100}; a store is put into an empty or a new "
            "directory only"
        )


def clear(directory: Path) -> None:
    """Remove what a filling has left, last the file that shows that it is of one."""
    begun = directory / FETCHING_FILE
    if not exists(begun):
        return
    for path in list_directory(directory):
        if is_store_directory(path.name):
            shutil.rmtree(path)
    sync_directory(directory)
    begun.unlink()


def _keep_time(target: Path, view: StoreView) -> None:
    """Let the newest dense part be as old as it is: what is read is not newer for that."""
    for record in view.directories[DENSE_DIRECTORY].segments[-1:]:
        path = target / DENSE_DIRECTORY / record.file
        if path.exists():
            os.utime(path, (view.unix_seconds, view.unix_seconds))


def write_manifests(target: Path, view: StoreView) -> None:
    """Write the manifest of each directory of a state, as committed."""
    for name, remote in view.directories.items():
        write_manifest(target / name, name, remote, view.store_id)


def write_manifest(directory: Path, name: str, remote: RemoteDirectory, store_id: str) -> None:
    """Write one manifest, as committed."""
    content = {"directory": name, "store_id": store_id, **remote.to_content()}
    write_checksummed(directory / MANIFEST_FILE, FORMAT_NAME, content)
