"""Keeps tables of a serving process as a publication says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import DamageError, UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.slot_keys import EMPTY, KEY
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.filesystem import read_whole
from cpr_ext.wings.publishing.keyed_rows import KeyedRows, gone_keys
from cpr_ext.wings.publishing.part_file import ROW_ID, checksum_of, read_tensors
from cpr_ext.wings.publishing.places import PublicationPlace, open_place
from cpr_ext.wings.publishing.publication import (
    DENSE,
    NO_STATE,
    Publication,
    PublishedFile,
    PublishedTable,
    PublishedUpdate,
)

logger = logger_of("publishing")

_TRIES = 5
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@dataclass(frozen=True)
class Applied:
    """What a poll applied.

    Attributes:
        number: of the state that the tables have now.
        step, num_samples: of that state.
        rows: rows written.
        file_bytes: bytes read.
        was_whole: all rows were written.
        age_seconds: since the state was published, by the clocks of both machines.
        saved_age_seconds: since the store got it; None: the publisher did not record that.
        gone: of each keyed table, the keys (n,) int64 that have no row any more.
        dense: the model's tensors that are no table, for ``load_state_dict(strict=False)``.
    """

    number: int
    step: int
    num_samples: int
    rows: int
    file_bytes: int
    was_whole: bool
    age_seconds: float
    saved_age_seconds: float | None
    dense: dict[str, torch.Tensor] = field(repr=False)
    gone: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


class Subscriber:
    """Applies a publication to tables.

    Args:
        publication: its directory or address; it may not exist yet.
        tables: modules with a ``weight``, or tensors, by the names that the tables have in the
            store; :class:`KeyedRows` for keyed ones. Others are left out. A publication of another
            shape or dtype is refused.

    Attributes:
        number: of the state that the tables have; 0: none yet, or an update was interrupted.
    """

    def __init__(
        self,
        publication: PublicationPlace,
        tables: Mapping[str, nn.Module | torch.Tensor | KeyedRows],
    ) -> None:
        self._place = open_place(publication)
        self._tables = {name: _weight(name, given) for name, given in tables.items()}
        self._keyed = {n: given for n, given in tables.items() if isinstance(given, KeyedRows)}
        self._state = NO_STATE
        self.number = 0

    def poll(self) -> Applied | None:
        """Apply what was published since the last call; None: nothing was.

        Every file of these tables is read and checked before the first row changes. While rows
        are written, lookups see some of the new rows and some of the old ones. Of a keyed table
        they do not find slots that get another key.

        Raises:
            UsageError: a table is not in the publication, or has another shape or dtype there.
            DamageError: a file is damaged; no row was changed.
            StorageError: the index could not be read; no row was changed.
            RemoteError: a request failed; no row was changed.
            OSError: a file could not be read.
        """
        for tries_left in reversed(range(_TRIES)):
            index = self._place.read_index()
            if index is None:
                return None
            try:
                return self._follow(index)
            except (FileNotFoundError, DamageError) as error:
                # The publisher may have replaced what this index names.
                if self._place.read_index() == index or not tries_left:
                    if isinstance(error, FileNotFoundError):
                        raise DamageError(f"{error.filename}: it is missing") from error
                    raise
        raise AssertionError("the last try returns or raises")

    def _follow(self, index: Publication) -> Applied | None:
        is_begun = self._state != NO_STATE
        if is_begun and self._state == index.state:
            return None
        self._require_fit(index)
        way = index.way_from(self._state) if is_begun else None
        was_whole = way is None
        if was_whole and is_begun and index.number <= self.number:
            logger.warning(
                "'%s' was put back: its state %d does not follow from state %d, which the tables "
                "hold. All rows are taken again",
                *(self._place.name, index.number, self.number),
            )
        if way is None:
            if (whole := index.newest_whole) is None:
                return None
            way = (whole, *(index.way_from(whole.state) or ()))
        wanted = {DENSE, *self._tables}
        files = [file for update in way for file in update.files if file.table in wanted]
        with self._place.files(files) as directory:
            for file in files:
                if checksum_of(directory / file.file, file.file_bytes) != file.crc32c:
                    raise DamageError(f"{directory / file.file}: its checksum differs")
            columns = self._read_keys(way, directory, was_whole=was_whole)
            gone = {n: gone_keys(n, self._keyed[n].key, c) for n, c in columns.items()}
            for name, column in columns.items():
                keyed = self._keyed[name]
                keyed.hide(torch.nonzero(keyed.key != column).flatten())
            self.number = 0  # until all of it is applied
            self._state = NO_STATE
            rows = sum(self._apply(update, index.tables, directory) for update in way)
            dense = _read(directory, next(f for f in way[-1].files if f.table == DENSE))
            for name, column in columns.items():
                self._keyed[name].set_keys(column)
        newest = way[-1]
        self.number, self._state = newest.number, newest.state
        now, saved = time.time(), newest.saved_unix_seconds
        return Applied(
            newest.number,
            newest.step,
            newest.num_samples,
            rows,
            sum(file.file_bytes for file in files),
            was_whole,
            now - newest.unix_seconds,
            None if saved is None else now - saved,
            dense,
            gone,
        )

    def _read_keys(
        self, way: Sequence[PublishedUpdate], directory: Path, *, was_whole: bool
    ) -> dict[str, torch.Tensor]:
        """Return the key of each slot once updates are applied; nothing is changed yet."""
        columns = {}
        for name, keyed in self._keyed.items():
            column = torch.full_like(keyed.key, EMPTY) if was_whole else keyed.key.clone()
            for update in way:
                for file in update.files:
                    if file.table == name:
                        _put_keys(column, _read(directory, file), file)
            columns[name] = column
        return columns

    def _apply(
        self, update: PublishedUpdate, tables: Mapping[str, PublishedTable], directory: Path
    ) -> int:
        rows = 0
        for file in update.files:
            if file.table is not None and file.table in self._tables:
                row_ids, values = _rows_of(directory, file, tables[file.table])
                weight = self._tables[file.table]
                put_rows(weight, row_ids, values)
                rows += len(row_ids)
        return rows

    def _require_fit(self, index: Publication) -> None:
        for name, weight in self._tables.items():
            if (table := index.tables.get(name)) is None:
                raise UsageError(
                    f"'{self._place.name}' has no table '{name}'; it has: "
                    f"{', '.join(sorted(index.tables))}"
                )
            if table.is_keyed != (name in self._keyed):
                needed = "KeyedRows" if table.is_keyed else "a module or a tensor"
                raise UsageError(
                    f"table '{name}' is {'' if table.is_keyed else 'not '}keyed in "
                    f"'{self._place.name}'; give Subscriber {needed} for it"
                )
            shape = (table.num_embeddings, table.embedding_dim)
            if (tuple(weight.shape), weight.dtype) != (shape, table.dtype):
                raise UsageError(
                    f"table '{name}' is {weight.dtype} of shape {tuple(weight.shape)}; published "
                    f"is {table.dtype} of shape {shape}"
                )


def _rows_of(
    directory: Path, file: PublishedFile, table: PublishedTable
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = _read(directory, file)
    if not {ROW_ID, WEIGHT} <= tensors.keys():
        raise DamageError(f"{file.file}: it has no rows")
    row_ids, values = tensors[ROW_ID], tensors[WEIGHT]
    form = (row_ids.dtype, row_ids.dim(), values.dtype, tuple(values.shape))
    wanted = (torch.int64, 1, table.dtype, (row_ids.numel(), table.embedding_dim))
    is_inside = form == wanted and (
        len(row_ids) == 0 or 0 <= int(row_ids.min()) <= int(row_ids.max()) < table.num_embeddings
    )
    if not is_inside:
        raise DamageError(f"{file.file}: rows that '{file.table}' does not have")
    return row_ids, values


def _put_keys(
    column: torch.Tensor, tensors: Mapping[str, torch.Tensor], file: PublishedFile
) -> None:
    row_ids, keys = (tensors.get(name, torch.empty(0)) for name in (ROW_ID, KEY))
    is_sound = row_ids.dtype == keys.dtype == torch.int64 and row_ids.shape == keys.shape
    if is_sound and row_ids.numel():
        is_sound = 0 <= int(row_ids.min()) <= int(row_ids.max()) < len(column)
        is_sound = is_sound and int(keys.min()) >= EMPTY
    if not is_sound:
        raise DamageError(f"{file.file}: keys that '{file.table}' cannot have")
    column[row_ids] = keys


def _read(directory: Path, file: PublishedFile) -> dict[str, torch.Tensor]:
    data = read_whole(directory / file.file, file.file_bytes)
    if native.crc32c(data) != file.crc32c:
        raise DamageError(f"{directory / file.file}: its checksum differs")
    return read_tensors(data, file.file)


def put_rows(weight: torch.Tensor, row_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows into a table, bit for bit."""
    # torch does not index unsigned numbers of several bytes.
    dtype = _SIGNED.get(weight.dtype, weight.dtype)
    target = weight.detach().view(dtype)
    target.index_copy_(0, row_ids.to(weight.device), values.view(dtype).to(weight.device))


def _weight(name: str, given: nn.Module | torch.Tensor | KeyedRows) -> torch.Tensor:
    weight = given.weight if isinstance(given, nn.Module | KeyedRows) else given
    if not isinstance(weight, torch.Tensor):
        raise UsageError(f"table {name!r} is a {type(given).__name__}; needed: tensor or module")
    return weight
