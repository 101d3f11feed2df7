"""The manifest: all that is committed in a store, replaced as a whole by one atomic rename.

Everything in it comes from a file that may be untrusted. :meth:`Manifest.from_content` is the one
gate: whatever does not make a store is a ``DamageError`` there, also for ``cpr repair``.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cpr_ext.errors import DamageError, UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES, DTYPES
from cpr_ext.state.position import is_count
from cpr_ext.state.slot_keys import KEY, is_key_array
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.checksummed_json import (
    FREE_BYTES,
    REPAIR_HINT,
    read_checksummed,
    serialize_document,
    write_checksummed,
)
from cpr_ext.storage.file_names import MANIFEST_FILE, PREVIOUS_FILE, Kind, segment_name
from cpr_ext.storage.ids import is_id, new_id, split_ids

_MAX_ROWS = 2**48


@dataclass(frozen=True)
class StoredTable:
    """A table of a store: weight (num_embeddings, embedding_dim) of ``dtype``.

    ``part`` is what of a larger table it is, if other stores hold the rest. ``keys`` are the
    arrays that say which id each row belongs to; none: row i belongs to id i.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    part: TablePart | None = None
    keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, table: Table) -> StoredTable:
        """Return what a store records of a live table."""
        return cls(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            table.weight.dtype,
            table.part,
            () if table.slots is None else tuple(sorted(table.slots.arrays())),
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values, without the name."""
        described: dict[str, Any] = {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "dtype": DTYPE_NAMES[self.dtype],
        }
        if self.keys:
            described["keys"] = list(self.keys)
        return described | ({"part": self.part.to_json()} if self.part is not None else {})

    @classmethod
    def from_json(cls, name: str, table: Any) -> StoredTable:
        """Invert :meth:`to_json`; raises ValueError, or what comes of other types."""
        shape = (_count(table["num_embeddings"]), _count(table["embedding_dim"]))
        part = TablePart.from_json(table["part"]) if "part" in table else None
        if part is not None and part.shape != shape:
            raise ValueError(
                f"table {name!r:.100} of shape {shape} is a part of shape {part.shape}"
            )
        keys = tuple(map(str, table.get("keys", ())))
        if keys and (KEY not in keys or not all(map(is_key_array, keys))):
            raise ValueError(f"table {name!r:.100} has keys {keys!r:.100}")
        return cls(name, *shape, DTYPES[table["dtype"]], part, keys)


@dataclass(frozen=True)
class StoredModel:
    """The tables of a store by name."""

    tables: Mapping[str, StoredTable]

    @classmethod
    def of(cls, tables: Sequence[Table]) -> StoredModel:
        """Return what a store records of live tables."""
        return cls({table.name: StoredTable.of(table) for table in tables})

    @cached_property
    def text(self) -> str:
        """It as JSON."""
        tables = {name: table.to_json() for name, table in self.tables.items()}
        return json.dumps({"tables": tables}, separators=(",", ":"))

    @classmethod
    def from_json(cls, value: Any) -> StoredModel:
        """Invert :attr:`text`, parsed; raises ValueError, or what comes of other types."""
        tables = {name: StoredTable.from_json(name, t) for name, t in value["tables"].items()}
        return cls(tables)

    def table(self, name: str) -> StoredTable:
        """Return the table of a name.

        Raises:
            UsageError: there is none; the message lists those that are.
        """
        if name not in self.tables:
            raise UsageError(f"no table '{name}'; there are: {', '.join(sorted(self.tables))}")
        return self.tables[name]

    @cached_property
    def row_ranges(self) -> Mapping[str, tuple[int, int]]:
        """All rows [0, n), by table."""
        return {name: (0, table.num_embeddings) for name, table in self.tables.items()}

    def differences(self, live: StoredModel) -> list[str]:
        """Return what a live model has otherwise, one sentence each."""
        old, new = self.tables, live.tables
        found = [f"table '{name}' is not in the model" for name in old.keys() - new]
        found += [f"table '{name}' is not in the store" for name in new.keys() - old]
        for name in sorted(old.keys() & new.keys()):
            stored, wanted = old[name].to_json(), new[name].to_json()
            for key in sorted(stored.keys() | wanted.keys()):
                if (theirs := wanted.get(key)) != (ours := stored.get(key)):
                    found.append(f"table '{name}' has {key} {ours}, the model {theirs}")
        return sorted(found)


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_ROWS:
        raise ValueError(f"{value!r:.100} is not a count")
    return value


FORMAT_NAME = "cpr_ext.manifest"
MAX_SEGMENT_BYTES = 1 << 50  # as in csrc/pipeline/segment_plan.h
# So many commits before the newest are listed: which a copy may be of, and still be continued.
ANCESTORS_KEPT = 512


@dataclass(frozen=True)
class SegmentRecord:
    """What a manifest says of one segment.

    Attributes:
        kind: ``base`` (all rows), ``partial`` (selected rows) or ``dense``.
        snapshot: number of the snapshot; newer ones are higher.
        id: of the snapshot, which no other has, in this or in any other store.
        first_step, last_step: the steps at which its rows were captured.
        num_samples: samples trained when the last of them was captured.
        file_bytes, header_bytes, header_crc32c: how to read and check it.
        is_complete: dense only. The snapshots up to this one contain every row with its value at
            ``last_step``: a full-recovery point.
    """

    kind: Kind
    snapshot: int
    id: str
    first_step: int
    last_step: int
    num_samples: int
    file_bytes: int
    header_bytes: int
    header_crc32c: int
    is_complete: bool = False

    @cached_property
    def file(self) -> str:
        """Its file's name; never a path."""
        return segment_name(self.snapshot, self.kind)

    @cached_property
    def text(self) -> str:
        """It as JSON."""
        flag = ',"is_complete":true' if self.is_complete else ""
        counts = "".join(f',"{name}":{getattr(self, name)}' for name in _COUNTS)
        return f'{{"kind":"{self.kind}","id":"{self.id}"{counts}{flag}}}'

    @classmethod
    def from_json(cls, value: Any) -> SegmentRecord:
        """Invert :attr:`text`, parsed; raises ValueError, or TypeError for other fields."""
        record = cls(**value)
        for name in _COUNTS:
            if not is_count(count := getattr(record, name)):
                raise ValueError(f"{name} is {count!r:.100}")
        if record.file_bytes > MAX_SEGMENT_BYTES:
            raise ValueError(f"file_bytes is {record.file_bytes}, of at most {MAX_SEGMENT_BYTES}")
        if not is_id(record.id) or type(record.is_complete) is not bool:
            raise ValueError("a field of a segment has another type")
        if record.first_step > record.last_step:
            raise ValueError(f"a segment ends at step {record.last_step}, before its first")
        return record


_COUNTS = tuple(
    field.name for field in fields(SegmentRecord) if field.name not in ("kind", "id", "is_complete")
)
Records = tuple[SegmentRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """One committed state of a store.

    Attributes:
        store_id: identity of the store.
        model: its tables.
        commit_id: identity of this state; no other has it.
        ancestors: commits before it, oldest first, so many as are kept.
        dense: dense parts, oldest first: each is a snapshot, committed as a whole.
        rows: segments of rows, oldest first; a snapshot that found none to save has none.
    """

    store_id: str
    model: StoredModel
    commit_id: str
    ancestors: tuple[str, ...]
    dense: Records
    rows: Records

    @classmethod
    def new(cls, model: StoredModel) -> Manifest:
        """Return that of a new store."""
        identity = new_id()
        return cls(identity, model, identity, (), (), ())

    @classmethod
    def from_content(cls, content: Any, place: str) -> Manifest:
        """Return what a document of ``place`` says.

        Raises:
            DamageError: it does not make a store.
        """
        try:
            manifest = cls(
                content["store_id"],
                StoredModel.from_json(content["model"]),
                content["commit_id"],
                split_ids(content["ancestors"]),
                tuple(map(SegmentRecord.from_json, content["dense"])),
                tuple(map(SegmentRecord.from_json, content["rows"])),
            )
            manifest._check()
        except Exception as error:  # of whatever a document may hold
            raise DamageError(f"{place}: {error!r:.300}{REPAIR_HINT}") from error
        return manifest

    @classmethod
    def from_text(cls, text: str, place: str) -> Manifest:
        """Invert :attr:`text`; raises DamageError."""
        return cls.from_content(json.loads(text), place)

    def _check(self) -> None:
        """Raise ValueError unless the parts fit together."""
        if not all(map(is_id, (self.store_id, self.commit_id, *self.ancestors))):
            raise ValueError("an identity is none")
        for records, kinds in ((self.dense, ("dense",)), (self.rows, ("base", "partial"))):
            if any(record.kind not in kinds for record in records):
                raise ValueError(f"a segment is in the place of {kinds}")
            if any(newer.snapshot <= older.snapshot for older, newer in pairwise(records)):
                raise ValueError("its snapshots do not ascend")
        ids: dict[int, str] = {}
        if any(ids.setdefault(r.snapshot, r.id) != r.id for r in self.records()):
            raise ValueError("segments of one snapshot are of two")
        if self.rows and self.rows[-1].snapshot > (self.dense[-1].snapshot if self.dense else 0):
            raise ValueError("a segment of rows is of no snapshot")
        bases = [record.snapshot for record in self.rows if record.kind == "base"]
        if self.dense and self.model.tables and (not bases or bases[0] > self.dense[0].snapshot):
            raise ValueError(f"it has no base of snapshot {self.dense[0].snapshot} or before")

    def require_room(self, limit: int, place: Path) -> None:
        """Raise DamageError if a number is so high that little can be counted on from it."""
        counts = (max(r.snapshot, r.last_step, r.num_samples) for r in self.records())
        if (highest := max(counts, default=0)) > limit:
            raise DamageError(f"{place}: it counts to {highest}; no training gets beyond {limit}")

    def records(self) -> Iterator[SegmentRecord]:
        """Yield every segment."""
        yield from self.dense
        yield from self.rows

    @property
    def newest(self) -> SegmentRecord | None:
        """The newest snapshot; None: there is none."""
        return self.dense[-1] if self.dense else None

    @property
    def file_bytes(self) -> int:
        """Size of all segments."""
        return sum(record.file_bytes for record in self.records())

    def at(self, snapshot: int) -> Records:
        """Return the segments of rows that make the state at ``snapshot``, oldest first.

        They begin with the newest base; what is older than that can only serve as a fallback.
        """
        records = self.rows
        end = bisect_right(records, snapshot, key=lambda record: record.snapshot)
        bases = [index for index in range(end) if records[index].kind == "base"]
        return records[bases[-1] if bases else 0 : end]

    def descends_from(self, commit_id: str) -> bool:
        """Return whether this state is known to follow from a commit, or is of it."""
        return commit_id == self.commit_id or commit_id in self.ancestors

    def next(
        self,
        dense: Records,
        rows: Records,
        *,
        commit_id: str = "",
        pinned: frozenset[str] = frozenset(),
    ) -> Manifest:
        """Return a state that follows this one.

        Args:
            commit_id: its identity; empty: a new one.
            pinned: ancestors that stay, however old.
        """
        known = (*self.ancestors, self.commit_id)
        older = tuple(commit for commit in known[:-ANCESTORS_KEPT] if commit in pinned)
        ancestors = (*older, *known[-ANCESTORS_KEPT:])
        return replace(
            self,
            commit_id=commit_id or new_id(),
            ancestors=ancestors,
            dense=dense,
            rows=rows,
        )

    @property
    def text(self) -> str:
        """It as JSON."""
        return (
            f'{{"store_id":"{self.store_id}",\n"commit_id":"{self.commit_id}",\n'
            f'"ancestors":"{"".join(self.ancestors)}",\n"model":{self.model.text},\n'
            f'"dense":{_listed(self.dense)},\n"rows":{_listed(self.rows)}}}'
        )

    def to_bytes(self) -> bytes:
        """Return the document."""
        return serialize_document(FORMAT_NAME, self.text)


def _listed(records: Records) -> str:
    return "[" + ",\n".join(record.text for record in records) + "]"


def older_than_previous(store: Path, manifest: Manifest) -> str | None:
    """Return what is wrong if ``MANIFEST.prev`` follows from the manifest; None: it does not.

    The manifest was replaced by an older copy then. Nobody may write to the store meanwhile.
    """
    with suppress(DamageError):  # of the one before; the next commit writes it again
        previous = read_manifest(store, PREVIOUS_FILE)
        if previous is not None and manifest.commit_id in previous.ancestors:
            return (
                f"{store / MANIFEST_FILE} is older than {PREVIOUS_FILE}: it was replaced by an "
                f"older copy. Put the whole store back from one copy{REPAIR_HINT}"
            )
    return None


def write_manifest(store: Path, manifest: Manifest) -> None:
    """Make ``manifest`` that of a store, durably; the one before stays as ``MANIFEST.prev``.

    Raises:
        StorageError: the operating system refused. The old one is intact, unless only the directory
            could not be synced.
    """
    path = store / MANIFEST_FILE
    write_checksummed(path, FORMAT_NAME, manifest.text, previous=store / PREVIOUS_FILE)


def read_manifest(
    store: Path, file: str = MANIFEST_FILE, *, free_bytes: int = FREE_BYTES
) -> Manifest | None:
    """Return the manifest of a store; None: there is none.

    Raises:
        DamageError: it is not what was committed.
        StoreError: it has a format version not known here.
        StorageError: the operating system refused to read.
    """
    content = read_checksummed(store / file, FORMAT_NAME, free_bytes=free_bytes)
    return None if content is None else Manifest.from_content(content, str(store / file))
