"""Write the changed rows of a store as files that consumers poll."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from cpr_ext.errors import DamageError, StorageError, StoreError
from cpr_ext.storage.ids import new_id
from cpr_ext.storage.locks import reader_lease
from cpr_ext.wings.publishing.changed_rows import (
    ChangedRows,
    PositionError,
    RowBatch,
    StorePosition,
    changed_rows,
)
from cpr_ext.wings.publishing.part_file import checksum_of, write_batches, write_tensors
from cpr_ext.wings.publishing.places import Place, PublicationPlace, open_place
from cpr_ext.wings.publishing.publication import (
    DENSE,
    Publication,
    PublishedFile,
    PublishedTable,
    PublishedUpdate,
    file_name,
)

PART_BYTES = 64 << 20
_TRIES = 5


@dataclass(frozen=True)
class PublishReport:
    """What a publication brought.

    Attributes:
        number: of the newest state; 0: the store holds none.
        step, num_samples: of that state.
        rows: how many rows its update has; 0: nothing was committed since the last one.
        file_bytes: size of the files written.
        is_copy: all rows were written.
        wrote_whole: an update that needs no state before it was written.
        position: of the store, at the newest state.
    """

    directory: str
    number: int
    step: int
    num_samples: int
    rows: int
    file_bytes: int
    is_copy: bool
    wrote_whole: bool
    position: StorePosition


def publish(
    store: str | os.PathLike[str],
    to: PublicationPlace,
    *,
    states: bool = False,
    whole: bool = False,
    renew_after: float = 1.0,
    part_bytes: int = PART_BYTES,
) -> PublishReport:
    """Write what was committed to ``store`` since the last call with the same ``to``.

    The first call writes all rows. Where the store does not show what changed, all rows
    are written. Memory is that of one file and one chunk of the store.

    Args:
        to: a directory, an address such as ``s3://bucket/rows``, or
            :class:`~cpr_ext.wings.remote.RemoteOptions`.
        states: write per-row optimizer states, too.
        whole: write all rows for new consumers in any case; for a store of another model, begin the
            publication again.
        renew_after: write all rows again once updates exceed this many times the bytes of the last
            such writing. Older updates and their files go then.
        part_bytes: about how large a file gets.

    Raises:
        StoreError: ``to`` is in use, no publication, or that of a store of other tables; another
            process published to it; or ``store`` is no store, or holds no snapshot.
        DamageError: the store or the index is damaged; the publication is as before.
        StorageError: the operating system refused; the publication is as before.
        RemoteError: a request failed. The publication is as before; or it has the new state, if
            the answer was lost.
    """
    place = open_place(to)
    for tries_left in reversed(range(_TRIES)):
        try:
            # The lease of all reading: a commit removes no file that is still to be read.
            with place.opened() as directory, reader_lease(Path(store)):
                writer = _Writer(place, directory, states, part_bytes)
                return writer.publish(store, whole=whole, renew_after=renew_after)
        except _StoreMovedError:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


class _StoreMovedError(StoreError):
    """The store committed more while all rows were to be written, or removed files."""


class _Next(NamedTuple):
    """The state that is to be published: its number, its identity, and that of the one before."""

    number: int
    state: str
    after: str


class _Writer:
    def __init__(
        self,
        place: Place,
        directory: Path,
        states: bool,
        part_bytes: int,
    ) -> None:
        self._place = place
        self._directory = directory
        self._states = states
        self._part_bytes = part_bytes

    def publish(
        self,
        store: str | os.PathLike[str],
        *,
        whole: bool,
        renew_after: float,
    ) -> PublishReport:
        known = self._place.read_index()
        self._place.begin(known)
        before = known
        try:
            since = None if known is None else known.position
            changes = changed_rows(store, since, states=self._states, on_gap="copy")
        except PositionError as error:
            if not whole:
                raise PositionError(
                    f"'{self._place.name}' is a publication of a store of other tables; "
                    "choose another place, or begin it again with whole=True (--whole)"
                ) from error
            before = None
            changes = changed_rows(store, states=self._states)
        if before is None:
            before = Publication(_tables(changes), changes.until, ())
        elif before.position == changes.until and not whole:
            return self._report(before, [], changes)
        # Numbers go on after those of another store: names of files are not used again.
        next_one = _Next(1 + (0 if known is None else known.number), new_id(), before.state)
        written = self._updates(store, before, changes, next_one, whole=whole, after=renew_after)
        index = _joined(before, changes, written)
        # Files of the index before stay until the next call: a consumer may be reading them.
        self._place.add_index(known, index)
        return self._report(index, written, changes)

    def _updates(
        self,
        store: str | os.PathLike[str],
        before: Publication,
        changes: ChangedRows,
        next_one: _Next,
        *,
        whole: bool,
        after: float,
    ) -> list[PublishedUpdate]:
        last = before.newest_whole
        if last is None:
            return [self._write(changes, next_one, is_whole=True)]
        if not whole and _bytes_after(before, last) <= after * last.file_bytes:
            return [self._write(changes, next_one, is_whole=False)]
        try:
            every = changed_rows(store, states=self._states, until=changes.until)
        except PositionError as error:
            raise _StoreMovedError(str(error)) from error
        return [
            self._write(changes, next_one, is_whole=False),
            self._write(every, next_one, is_whole=True),
        ]

    def _write(self, changes: ChangedRows, of: _Next, *, is_whole: bool) -> PublishedUpdate:
        number = of.number
        files: list[PublishedFile] = []

        def take(name: str, table: str | None, rows: int) -> None:
            files.append(self._described(name, table, rows))
            self._place.add_file(files[-1])

        def add(batches: list[RowBatch]) -> None:
            name = file_name(number, is_whole=is_whole, part=len(files))
            write_batches(self._directory / name, batches)
            rows = sum(len(batch.row_ids) for batch in batches)
            take(name, batches[0].table, rows)

        try:
            for batches in self._parts(changes):
                add(batches)
            tensors = changes.dense_tensors()
        except (DamageError, StorageError) as error:
            if changes.is_gone():
                raise _StoreMovedError(str(error)) from error
            raise
        dense = file_name(number, is_whole=is_whole, part=len(files))
        write_tensors(self._directory / dense, tensors)
        take(dense, DENSE, 0)
        return PublishedUpdate(
            number,
            of.state,
            of.after,
            is_whole,
            changes.until.step,
            changes.until.num_samples,
            time.time(),
            tuple(files),
            changes.saved_unix_seconds,
        )

    def _parts(self, changes: ChangedRows) -> Iterator[list[RowBatch]]:
        """Yield batches of one table that are one file together."""
        waiting: list[RowBatch] = []
        waiting_bytes = 0
        for batch in changes:
            if waiting and (batch.table != waiting[0].table or waiting_bytes >= self._part_bytes):
                yield waiting
                waiting, waiting_bytes = [], 0
            waiting.append(batch)
            waiting_bytes += _size(batch)
        if waiting:
            yield waiting

    def _described(self, name: str, table: str | None, rows: int) -> PublishedFile:
        path = self._directory / name
        size_bytes = path.stat().st_size
        return PublishedFile(name, table, rows, size_bytes, checksum_of(path, size_bytes))

    def _report(
        self,
        index: Publication,
        written: list[PublishedUpdate],
        changes: ChangedRows,
    ) -> PublishReport:
        return PublishReport(
            directory=self._place.name,
            number=index.number,
            step=changes.until.step,
            num_samples=changes.until.num_samples,
            rows=sum(file.rows for file in written[0].files) if written else 0,
            file_bytes=sum(update.file_bytes for update in written),
            is_copy=changes.is_copy and bool(written),
            wrote_whole=any(update.is_whole for update in written),
            position=changes.until,
        )


def _bytes_after(index: Publication, whole: PublishedUpdate) -> int:
    return sum(update.file_bytes for update in index.updates if update.number > whole.number)


def _joined(
    before: Publication, changes: ChangedRows, written: list[PublishedUpdate]
) -> Publication:
    """Return the next index: a new whole update replaces all that the last one did not follow."""
    kept = before.updates
    last = before.newest_whole
    if last is not None and any(update.is_whole for update in written):
        kept = tuple(update for update in kept if update.number > last.number)
    return replace(before, position=changes.until, updates=(*kept, *written))


def _tables(changes: ChangedRows) -> dict[str, PublishedTable]:
    return {
        name: PublishedTable(
            table.num_embeddings, table.embedding_dim, table.dtype, bool(table.keys)
        )
        for name, table in changes.tables.items()
    }


def _size(batch: RowBatch) -> int:
    return sum(values.numel() * values.element_size() for values in batch.arrays.values())
