"""Keeps tables of a serving process as a publication says."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from cpr_ext._native import native
from cpr_ext.errors import DamageError, UsageError
from cpr_ext.publishing.part_file import ROW_ID, checksum_of, read_tensors
from cpr_ext.publishing.publication import (
    DENSE,
    Publication,
    PublishedFile,
    PublishedTable,
    PublishedUpdate,
    read_publication,
)
from cpr_ext.state.table import WEIGHT
from cpr_ext.storage.filesystem import read_whole

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
        dense: the model's tensors that are no table, for ``load_state_dict(strict=False)``.
    """

    number: int
    step: int
    num_samples: int
    rows: int
    file_bytes: int
    was_whole: bool
    age_seconds: float
    dense: dict[str, torch.Tensor] = field(repr=False)


class Subscriber:
    """Applies a publication to tables.

    Args:
        directory: the publication; it may not exist yet.
        tables: modules with a ``weight``, or tensors, by the names that the tables have in the
            store. Others are left out. A publication of another shape or dtype is refused.

    Attributes:
        number: of the state that the tables have; 0: none yet, or an update was interrupted.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tables: Mapping[str, nn.Module | torch.Tensor],
    ) -> None:
        self._directory = Path(directory)
        self._tables = {name: _weight(name, given) for name, given in tables.items()}
        self._identity = ""
        self.number = 0

    def poll(self) -> Applied | None:
        """Apply what was published since the last call; None: nothing was.

        Every file of all updates is read and checked before the first row changes. While rows are
        written, lookups see some of the new rows and some of the old ones.

        Raises:
            UsageError: a table is not in the publication, or has another shape or dtype there.
            DamageError: a file is damaged; no row was changed.
            StorageError: the index could not be read; no row was changed.
            OSError: a file could not be read.
        """
        for tries_left in reversed(range(_TRIES)):
            index = read_publication(self._directory)
            if index is None:
                return None
            try:
                return self._follow(index)
            except (FileNotFoundError, DamageError) as error:
                # The publisher may have replaced what this index names.
                if read_publication(self._directory) == index or not tries_left:
                    if isinstance(error, FileNotFoundError):
                        raise DamageError(f"{error.filename}: it is missing") from error
                    raise
        raise AssertionError("the last try returns or raises")

    def _follow(self, index: Publication) -> Applied | None:
        number = self.number if self._identity == index.identity else 0
        if number == index.number and number > 0:
            return None
        self._require_fit(index)
        way = index.way_from(number) if number > 0 else None
        was_whole = way is None
        if way is None:
            whole = index.newest_whole
            if whole is None:
                return None
            way = (whole, *(index.way_from(whole.number) or ()))
        for update in way:
            for file in update.files:
                self._require_sound(file)
        self.number = 0  # until all of it is applied
        self._identity = index.identity
        dense: dict[str, torch.Tensor] = {}
        rows = 0
        for update in way:
            rows += self._apply(update, index.tables)
        dense = self._read(next(f for f in way[-1].files if f.table == DENSE))
        newest = way[-1]
        self.number = newest.number
        return Applied(
            newest.number,
            newest.step,
            newest.num_samples,
            rows,
            sum(update.file_bytes for update in way),
            was_whole,
            time.time() - newest.unix_seconds,
            dense,
        )

    def _apply(self, update: PublishedUpdate, tables: Mapping[str, PublishedTable]) -> int:
        rows = 0
        for file in update.files:
            if file.table in self._tables and file.table != DENSE:
                tensors = self._read(file)
                row_ids, values = tensors[ROW_ID], tensors[WEIGHT]
                table = tables[file.table]
                inside = len(row_ids) == 0 or (
                    int(row_ids.min()) >= 0 and int(row_ids.max()) < table.num_embeddings
                )
                if not inside or values.shape != (len(row_ids), table.embedding_dim):
                    raise DamageError(f"{file.file}: rows that '{file.table}' does not have")
                weight = self._tables[file.table]
                put_rows(weight, row_ids, values)
                rows += len(row_ids)
        return rows

    def _require_sound(self, file: PublishedFile) -> None:
        if checksum_of(self._directory / file.file, file.file_bytes) != file.crc32c:
            raise DamageError(f"{self._directory / file.file}: its checksum differs")

    def _read(self, file: PublishedFile) -> dict[str, torch.Tensor]:
        data = read_whole(self._directory / file.file, file.file_bytes)
        if native.crc32c(data) != file.crc32c:
            raise DamageError(f"{self._directory / file.file}: its checksum differs")
        return read_tensors(data, file.file)

    def _require_fit(self, index: Publication) -> None:
        for name, weight in self._tables.items():
            if (table := index.tables.get(name)) is None:
                raise UsageError(
                    f"'{self._directory}' has no table '{name}'; it has: "
                    f"{', '.join(sorted(index.tables))}"
                )
            shape = (table.num_embeddings, table.embedding_dim)
            if (tuple(weight.shape), weight.dtype) != (shape, table.dtype):
                raise UsageError(
                    f"table '{name}' is {weight.dtype} of shape {tuple(weight.shape)}; published "
                    f"is {table.dtype} of shape {shape}"
                )


def put_rows(weight: torch.Tensor, row_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows into a table, bit for bit."""
    # torch does not index unsigned numbers of several bytes.
    dtype = _SIGNED.get(weight.dtype, weight.dtype)
    target = weight.detach().view(dtype)
    target.index_copy_(0, row_ids.to(weight.device), values.view(dtype).to(weight.device))


def _weight(name: str, given: nn.Module | torch.Tensor) -> torch.Tensor:
    weight = given.weight if isinstance(given, nn.Module) else given
    if not isinstance(weight, torch.Tensor):
        raise UsageError(f"table {name!r} is a {type(given).__name__}; needed: tensor or module")
    return weight
