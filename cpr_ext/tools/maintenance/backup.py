"""Copies of a store on this machine: of a store in use, and of a copy in object storage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpr_ext.errors import DamageError, StorageError, UsageError
from cpr_ext.recovery.verify import check_dense, check_rows, expect
from cpr_ext.storage.backup_notes import forget_backup, note_backup
from cpr_ext.storage.file_names import parse_shard_name
from cpr_ext.storage.filesystem import create_anew, open_regular, storage_error
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.remote.fetching import fetch_into
from cpr_ext.storage.remote.filling import Filling, LackingFile, filling
from cpr_ext.storage.remote.objects import RemoteOptions, open_objects
from cpr_ext.storage.remote.remote_state import StoreView, local_view
from cpr_ext.storage.store_reader import StoreReader, read_committed, read_identity


@dataclass(frozen=True)
class CopyReport:
    """A copy of a store, as it is now.

    Attributes:
        directory: the copy, which is a store.
        step: of its newest snapshot; -1: it has none.
        step_before: of what it held before; None: it is new.
        segments: files of rows and of dense parts that it holds.
        segments_read: of these, the files that were read; the others were there already.
        bytes_read: their size.
    """

    directory: str
    step: int
    step_before: int | None
    segments: int
    segments_read: int
    bytes_read: int


def backup(store: str | os.PathLike[str], directory: str | os.PathLike[str]) -> CopyReport:
    """Copy the newest committed state of a store, which training may be changing meanwhile.

    What is copied is read again and compared with its checksums. Only then the copy appears, or
    takes the place of an earlier one, as a whole.

    Args:
        store: the directory of one store.
        directory: empty or missing; or an earlier state of this store, from which only what is new
            is copied. Nobody may train on it.

    Raises:
        StoreError: what is in ``directory`` is no earlier state of this store, or is in use; or the
            store changed too often while it was read.
        DamageError: the store is damaged. A copy that was there stays as it is.
        StorageError: a file could not be read or written.
        UsageError: one of the two is inside the other.
    """
    source, place = Path(store), Path(directory).absolute()
    _require_apart(source, place)
    read_identity(source)  # before anything is made
    noted: set[str] = set()
    kept = ""  # the commit that the backup is of at the end
    try:
        with filling(place, may_replace=True) as filled:
            kept = "" if filled.held is None else filled.held.commit_id
            noted.add(kept)

            def take(reader: StoreReader) -> StoreView:
                view = local_view(reader)
                note_backup(source, view.commit_id, place)
                noted.add(view.commit_id)
                filled.fill(view, lambda wanted: _copy_files(source, filled, wanted))
                return view

            view = read_committed(source, take)
            _check_copied(filled, StoreReader(source))
        kept = view.commit_id
    finally:
        for commit_id in noted - {kept}:
            forget_backup(source, commit_id, place)
    return _report(place, filled, view)


def fetch(remote: str | RemoteOptions, directory: str | os.PathLike[str]) -> CopyReport:
    """Read the newest state of a copy in object storage into a directory.

    Args:
        remote: its address.
        directory: empty or missing; or an earlier state of the same store, such as one put back
            from a backup: only what it lacks is read. Nobody may train on it.

    Raises:
        StoreError: there is no state, or ``directory`` holds something else, or is in use.
        DamageError: an object is not as written, or missing.
        RemoteError: a request failed.
        StorageError: a file could not be written.
    """
    objects = open_objects(RemoteOptions(remote) if isinstance(remote, str) else remote)
    place = Path(directory)
    with filling(place, may_replace=True) as filled:
        view = fetch_into(objects, filled).view
    return _report(place, filled, view)


def _report(place: Path, filled: Filling, view: StoreView) -> CopyReport:
    read = [record for _, record in filled.read]
    return CopyReport(
        directory=str(place),
        step=view.step,
        step_before=None if filled.held is None else filled.held.step,
        segments=len(view.records()),
        segments_read=len(read),
        bytes_read=sum(record.file_bytes for record in read),
    )


def _require_apart(source: Path, place: Path) -> None:
    one, other = Path(os.path.realpath(source)), Path(os.path.realpath(place))
    if one == other or one in other.parents or other in one.parents:
        raise UsageError(f"'{place}' and '{source}' are not apart: choose another directory")


def _copy_files(source: Path, filled: Filling, wanted: Sequence[LackingFile]) -> None:
    for each in wanted:
        path = source / each.directory / each.record.file
        try:
            with (
                os.fdopen(open_regular(path), "rb") as file,
                os.fdopen(create_anew(each.path), "wb") as copy,
            ):
                if (found := os.fstat(file.fileno()).st_size) != each.record.file_bytes:
                    raise DamageError(
                        f"{path}: {found} bytes, the manifest recorded {each.record.file_bytes}"
                    )
                shutil.copyfileobj(file, copy, 4 << 20)
                copy.flush()
                os.fsync(copy.fileno())
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error("copy", path, error) from error
        filled.note_read(each)


def _check_copied(filled: Filling, reader: StoreReader) -> None:
    """Read what was copied again.

    Raises:
        DamageError: a byte differs from what was committed.
    """
    try:
        for name in sorted({name for name, _ in filled.read}):
            manifest = Manifest(filled.target / name, store_id=reader.store_id)
            for record in sorted(
                (record for of, record in filled.read if of == name), key=lambda r: r.snapshot
            ):
                shard = parse_shard_name(name)
                if shard is None:
                    check_dense(manifest, record)
                else:
                    check_rows(manifest, record, expect(reader.tables, shard, reader.num_shards))
    except DamageError as error:
        raise DamageError(
            f"'{reader.directory}' was not copied, as a file of it is damaged (or its copy): "
            f"{error}. `cpr verify` shows what is wrong, `cpr repair` what can be rebuilt"
        ) from error
