"""The index of a publication: which files a consumer applies, in which order.

A publication is a directory. Its index is replaced as a whole by one rename, after all files that
it names are durable. So a consumer that polls it sees one complete publication or the next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cpr_ext.errors import DamageError
from cpr_ext.publishing.store_position import StorePosition
from cpr_ext.state.dtypes import DTYPE_NAMES, DTYPES
from cpr_ext.state.position import is_count
from cpr_ext.storage.checksummed_json import read_checksummed, write_checksummed

INDEX_FILE = "PUBLICATION.json"
FORMAT_NAME = "cpr_ext.publication"
DENSE = ""  # in the place of a table's name
_FILE_NAME = re.compile(r"\d{8,}-(whole|changed)-\d{5,}\.(safetensors|parquet)", re.ASCII)


def file_name(number: int, *, is_whole: bool, part: int, suffix: str) -> str:
    """Return the name of a file of a publication."""
    return f"{number:08d}-{'whole' if is_whole else 'changed'}-{part:05d}.{suffix}"


def is_file_name(name: str) -> bool:
    """Return whether it is the name of a file of a publication, and no path."""
    return _FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class PublishedTable:
    """Shape and dtype of a table's weight."""

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PublishedFile:
    """A file: rows of ``table``, or with ``DENSE`` the tensors that are no table's."""

    file: str
    table: str
    rows: int
    file_bytes: int
    crc32c: int


@dataclass(frozen=True)
class PublishedUpdate:
    """Files that bring a consumer to a state.

    Attributes:
        number: of the state that it leads to; states count from 1.
        is_whole: from any state. Else from that of ``number - 1``.
        step, num_samples: of the state.
        unix_seconds: when it was published, by the publisher's clock.
    """

    number: int
    is_whole: bool
    step: int
    num_samples: int
    unix_seconds: float
    files: tuple[PublishedFile, ...]

    @property
    def file_bytes(self) -> int:
        """Size of its files."""
        return sum(file.file_bytes for file in self.files)


@dataclass(frozen=True)
class Publication:
    """What an index says.

    Attributes:
        identity: another one means that numbers count from 1 again.
        position: of the store, at the newest state.
        updates: oldest first.
    """

    identity: str
    tables: Mapping[str, PublishedTable]
    position: StorePosition
    updates: tuple[PublishedUpdate, ...]

    @property
    def number(self) -> int:
        """Number of the newest state; 0: there is none."""
        return max((update.number for update in self.updates), default=0)

    @property
    def newest_whole(self) -> PublishedUpdate | None:
        """The newest update that needs no state before it."""
        return next((update for update in reversed(self.updates) if update.is_whole), None)

    def way_from(self, number: int) -> tuple[PublishedUpdate, ...] | None:
        """Return the updates from a state to the newest one, in order; None: there are none."""
        changed = {u.number: u for u in self.updates if not u.is_whole}
        wanted = range(number + 1, self.number + 1)
        return tuple(changed[n] for n in wanted) if all(n in changed for n in wanted) else None

    def write(self, directory: Path) -> None:
        """Replace the index.

        Raises:
            StorageError: the operating system refused.
        """
        content = {
            "identity": self.identity,
            "tables": {
                name: asdict(table) | {"dtype": DTYPE_NAMES[table.dtype]}
                for name, table in self.tables.items()
            },
            "position": self.position.to_json(),
            "updates": [asdict(update) for update in self.updates],
        }
        write_checksummed(directory / INDEX_FILE, FORMAT_NAME, content)


def read_publication(directory: str | os.PathLike[str]) -> Publication | None:
    """Read the index of a publication; None: there is none.

    Raises:
        DamageError: it is not as written.
        StoreError: it has a version not known here.
        StorageError: it could not be read.
    """
    path = Path(directory) / INDEX_FILE
    content = read_checksummed(path, FORMAT_NAME)
    if content is None:
        return None
    try:
        return Publication(
            str(content["identity"]),
            {str(name): _table(value) for name, value in content["tables"].items()},
            StorePosition.from_json(content["position"]),
            tuple(_update(value) for value in content["updates"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamageError(f"{path}: {error!r:.200}") from error


def _table(value: Any) -> PublishedTable:
    table = PublishedTable(**(value | {"dtype": DTYPES[value["dtype"]]}))
    _require_counts(table.num_embeddings, table.embedding_dim)
    return table


def _update(value: Any) -> PublishedUpdate:
    update = PublishedUpdate(**(value | {"files": tuple(map(_file, value["files"]))}))
    _require_counts(update.number, update.step, update.num_samples)
    if type(update.is_whole) is not bool or not isinstance(update.unix_seconds, float | int):
        raise ValueError("a field of an update has another type")
    return update


def _file(value: Any) -> PublishedFile:
    file = PublishedFile(**value)
    _require_counts(file.rows, file.file_bytes, file.crc32c)
    if not isinstance(file.table, str) or not is_file_name(file.file):
        raise ValueError(f"{file.file!r:.100} is no name of a file of a publication")
    return file


def _require_counts(*values: Any) -> None:
    if not all(map(is_count, values)):
        raise ValueError(f"{values!r:.100} are no counts")
