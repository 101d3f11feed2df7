"""The index of a publication: which files a consumer applies, in which order.

It is replaced as a whole, after all files that it names are durable. So a consumer that polls it
sees one complete publication or the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cpr_ext.errors import DamageError
from cpr_ext.state.dtypes import DTYPE_NAMES, DTYPES
from cpr_ext.state.position import is_count
from cpr_ext.storage.ids import is_id
from cpr_ext.wings.publishing.changed_rows import StorePosition

INDEX_FILE = "PUBLICATION.json"
FORMAT_NAME = "cpr_ext.publication"
DENSE = None  # in the place of a table's name
NO_STATE = ""  # before the first
_FILE_NAME = re.compile(r"\d{8,}-(whole|changed)-\d{5,}\.safetensors", re.ASCII)


def file_name(number: int, *, is_whole: bool, part: int) -> str:
    """Return the name of a file of a publication."""
    return f"{number:08d}-{'whole' if is_whole else 'changed'}-{part:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Return whether it is the name of a file of a publication, and no path."""
    return _FILE_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class PublishedTable:
    """Shape and dtype of a table's weight; ``is_keyed``: its rows belong to changing keys."""

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    is_keyed: bool = False


@dataclass(frozen=True)
class PublishedFile:
    """A file: rows of ``table``, or with ``DENSE`` the tensors that are no table's."""

    file: str
    table: str | None
    rows: int
    file_bytes: int
    crc32c: int


@dataclass(frozen=True)
class PublishedUpdate:
    """Files that bring a consumer to a state.

    Attributes:
        number: of the state that it leads to; states count from 1.
        state: identity of that state. Numbers are used again once a publication was put back from a
            backup.
        after: the state that it follows from.
        is_whole: from any state. Else from ``after`` alone.
        step, num_samples: of the state.
        unix_seconds: when it was published, by the publisher's clock.
        saved_unix_seconds: when the store got it, by the time of its file; None: not recorded.
    """

    number: int
    state: str
    after: str
    is_whole: bool
    step: int
    num_samples: int
    unix_seconds: float
    files: tuple[PublishedFile, ...]
    saved_unix_seconds: float | None = None

    @property
    def file_bytes(self) -> int:
        """Size of its files."""
        return sum(file.file_bytes for file in self.files)


@dataclass(frozen=True)
class Publication:
    """What an index says.

    Attributes:
        position: of the store, at the newest state.
        updates: oldest first.
    """

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

    @property
    def state(self) -> str:
        """The newest state."""
        return self.updates[-1].state if self.updates else NO_STATE

    def way_from(self, state: str) -> tuple[PublishedUpdate, ...] | None:
        """Return the updates from a state to the newest one, in order.

        None: the newest does not follow from it, as far as the index goes back.
        """
        changed = {update.after: update for update in self.updates if not update.is_whole}
        way: list[PublishedUpdate] = []
        while state != self.state and len(way) < len(self.updates):
            if (update := changed.get(state)) is None:
                return None
            way.append(update)
            state = update.state
        return tuple(way) if state == self.state else None

    def to_content(self) -> dict[str, Any]:
        """Return the content of an index."""
        return {
            "tables": {
                name: asdict(table) | {"dtype": DTYPE_NAMES[table.dtype]}
                for name, table in self.tables.items()
            },
            "position": self.position.to_json(),
            "updates": [asdict(update) for update in self.updates],
        }

    @classmethod
    def from_content(cls, content: Mapping[str, Any], place: str) -> Publication:
        """Invert :meth:`to_content`; ``place`` is where it was read.

        Raises:
            DamageError: it is not as written.
        """
        try:
            index = cls(
                {str(name): _table(value) for name, value in content["tables"].items()},
                StorePosition.from_json(content["position"]),
                tuple(_update(value) for value in content["updates"]),
            )
            _require_whole(index)
            return index
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"{place}: {error!r:.200}") from error


def _table(value: Any) -> PublishedTable:
    table = PublishedTable(**(value | {"dtype": DTYPES[value["dtype"]]}))
    _require_counts(table.num_embeddings, table.embedding_dim)
    if type(table.is_keyed) is not bool:
        raise ValueError(f"{table.is_keyed!r:.100} is no flag")
    return table


def _update(value: Any) -> PublishedUpdate:
    update = PublishedUpdate(**(value | {"files": tuple(map(_file, value["files"]))}))
    _require_counts(update.number, update.step, update.num_samples)
    times = (update.unix_seconds, update.saved_unix_seconds or 0.0)
    if type(update.is_whole) is not bool or not all(isinstance(t, float | int) for t in times):
        raise ValueError("a field of an update has another type")
    return update


def _file(value: Any) -> PublishedFile:
    file = PublishedFile(**value)
    _require_counts(file.rows, file.file_bytes, file.crc32c)
    if not isinstance(file.table, str | None) or not is_file_name(file.file):
        raise ValueError(f"{file.file!r:.100} is no name of a file of a publication")
    return file


def _require_whole(index: Publication) -> None:
    """Raise ValueError if an update lacks what each has, or the states do not follow."""
    numbers = [update.number for update in index.updates]
    if not numbers or numbers[0] < 1 or numbers != sorted(numbers):
        raise ValueError("its updates do not ascend")
    if index.newest_whole is None:
        raise ValueError("no update has all rows")
    for update in index.updates:
        of_tables = [file.table for file in update.files]
        if of_tables.count(DENSE) != 1 or not set(of_tables) <= {DENSE, *index.tables}:
            raise ValueError(f"update {update.number} has other files than its tables'")
        for file in update.files:
            if file.table is not None and file.rows > index.tables[file.table].num_embeddings:
                raise ValueError(f"{file.file} has more rows than its table")
        if not is_id(update.state) or not (update.after == NO_STATE or is_id(update.after)):
            raise ValueError(f"update {update.number} is of no state")
    if index.way_from(index.updates[0].state) is None:
        raise ValueError("its newest state does not follow from the first")


def _require_counts(*values: Any) -> None:
    if not all(map(is_count, values)):
        raise ValueError(f"{values!r:.100} are no counts")
