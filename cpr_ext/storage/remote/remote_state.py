"""What a remote store holds: one document per committed state, which is never changed.

    states/000000000012.json                                the newest state has the highest number
    objects/shard-00000/00000003-base.safetensors.0123abcd  a segment; its header's CRC32C

A state names every object that it needs, and all of them were there before it was created. So any
state is a committed one. A writer creates the state with the next number. If another writer
was faster, the creation fails, and the loser stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.position import is_count
from cpr_ext.storage.checksummed_json import parse_document, read_checksummed, serialize_document
from cpr_ext.storage.file_names import DENSE_DIRECTORY, STORE_FILE, parse_shard_name
from cpr_ext.storage.lineage import is_id, split_ids
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.remote.numbered import document_key, document_numbers, newest_document
from cpr_ext.storage.remote.objects import Objects
from cpr_ext.storage.store_reader import StoreReader

STATES = "states/"
OBJECTS = "objects/"
FORMAT_NAME = "cpr_ext.remote"


def state_key(number: int) -> str:
    """Return the name of a state's object."""
    return document_key(STATES, number)


def object_key(directory: str, record: SegmentRecord) -> str:
    """Return the name of a segment's object: another segment has another one."""
    return f"{OBJECTS}{directory}/{record.file}.{record.header_crc32c:08x}"


@dataclass(frozen=True)
class RemoteDirectory:
    """The manifest of one directory of the store."""

    generation: int
    commit_id: str
    ancestors: tuple[str, ...]
    seen: Mapping[str, int]
    segments: tuple[SegmentRecord, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> RemoteDirectory:
        """Return what a copy records of a manifest, as it is now."""
        return cls(
            manifest.generation,
            manifest.commit_id,
            manifest.ancestors,
            dict(manifest.seen),
            manifest.segments,
        )

    def to_content(self) -> dict[str, Any]:
        """Return it as plain values."""
        segments = [asdict(record) for record in self.segments]
        return {**vars(self), "ancestors": "".join(self.ancestors), "segments": segments}


@dataclass(frozen=True)
class StoreView:
    """A committed state of a local store, as one moment shows it.

    Attributes:
        model: the content of STORE.json.
        directories: by name.
        step: of the newest snapshot; -1: there is none.
        unix_seconds: when that was saved, by its machine's clock; 0: there is none.
    """

    model: Mapping[str, Any]
    directories: Mapping[str, RemoteDirectory]
    step: int
    unix_seconds: float = field(default=0.0, compare=False)

    @property
    def store_id(self) -> str:
        """Identity of the local store."""
        return str(self.model["store_id"])

    @property
    def commit_id(self) -> str:
        """The commit of the dense directory: which state of the store it is."""
        return self.directories[DENSE_DIRECTORY].commit_id

    @property
    def ancestors(self) -> tuple[str, ...]:
        """The commits from which this one follows, and the claims on the copy among them."""
        return self.directories[DENSE_DIRECTORY].ancestors

    def descends_from(self, other: StoreView) -> bool:
        """Return whether this state is known to follow from another, or to be the same."""
        return other.commit_id in (*self.ancestors, self.commit_id)

    def records(self) -> dict[str, tuple[str, SegmentRecord]]:
        """Return directory and record of each segment, by the name of its object."""
        return {
            object_key(name, record): (name, record)
            for name, directory in self.directories.items()
            for record in directory.segments
        }


def committed_view(model: Mapping[str, Any], manifests: Sequence[Manifest]) -> StoreView:
    """Return the state that manifests of a local store make, the dense directory's first."""
    newest = manifests[0].segments[-1:]
    directories = {each.directory.name: RemoteDirectory.of(each) for each in manifests}
    return StoreView(model, directories, newest[0].last_step if newest else -1)


def with_time(view: StoreView, store: Path) -> StoreView:
    """Return the state with the time at which its newest dense part was written; 0: it is gone."""
    for record in view.directories[DENSE_DIRECTORY].segments[-1:]:
        with suppress(OSError):
            saved = (store / DENSE_DIRECTORY / record.file).stat().st_mtime
            return replace(view, unix_seconds=saved)
    return replace(view, unix_seconds=0.0)


def local_view(reader: StoreReader) -> StoreView:
    """Return the committed state that a reader has looked at."""
    model = read_checksummed(reader.directory / STORE_FILE, "cpr_ext.store")
    if model is None:
        raise StoreError(f"'{reader.directory}' is no store any more")
    return with_time(committed_view(model, [reader.dense, *reader.shards]), reader.directory)


@dataclass(frozen=True)
class RemoteState:
    """A state of a remote store.

    Attributes:
        number: states count from 1.
        writer: identifies the process that added it.
        claim: the ancestor that only stores which may continue the copy have.
        view: what it holds.
        checksums: CRC32C of each object's bytes, by its name.
    """

    number: int
    writer: str
    claim: str
    view: StoreView
    checksums: Mapping[str, int]

    def may_be_continued_by(self, view: StoreView) -> bool:
        """Return whether a store follows from this state, and has its claim."""
        return view.descends_from(self.view) and self.claim in view.ancestors

    def taken_over(self, writer: str, claim: str) -> RemoteState:
        """Return the next state: the same, which only that writer's store may continue.

        What is read from it has the claim, too.
        """
        dense = self.view.directories[DENSE_DIRECTORY]
        dense = replace(dense, ancestors=(*dense.ancestors, claim))
        view = replace(self.view, directories={**self.view.directories, DENSE_DIRECTORY: dense})
        return RemoteState(self.number + 1, writer, claim, view, self.checksums)

    def to_bytes(self) -> bytes:
        """Return the document."""
        content = {
            "number": self.number,
            "writer": self.writer,
            "claim": self.claim,
            "model": self.view.model,
            "step": self.view.step,
            "unix_seconds": self.view.unix_seconds,
            "directories": {
                name: directory.to_content() for name, directory in self.view.directories.items()
            },
            "checksums": dict(self.checksums),
        }
        return serialize_document(FORMAT_NAME, content)

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> RemoteState:
        """Invert :meth:`to_bytes`.

        Raises:
            DamageError: any byte of it is not as written.
            StoreError: a version not known here.
        """
        content = parse_document(data, key, FORMAT_NAME)
        try:
            directories = {str(n): _directory(str(n), d) for n, d in content["directories"].items()}
            saved = float(content["unix_seconds"])
            view = StoreView(content["model"], directories, content["step"], saved)
            writer, claim = str(content["writer"]), content["claim"]
            state = cls(content["number"], writer, claim, view, content["checksums"])
            if DENSE_DIRECTORY not in directories or not is_id(content["model"]["store_id"]):
                raise ValueError("it names no store")
            if not is_id(claim):
                raise ValueError("a claim is no claim")
            missing = view.records().keys() - state.checksums.keys()
            if missing or state_key(state.number) != key:
                raise ValueError("it is another state, or names objects without a checksum")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamageError(f"{key}: {error!r:.200}") from error
        return state


def _directory(name: str, value: Any) -> RemoteDirectory:
    if name != DENSE_DIRECTORY and parse_shard_name(name) is None:
        raise ValueError(f"{name!r:.100} is no directory of a store")
    segments = tuple(SegmentRecord(**record) for record in value["segments"])
    counts = (value["generation"], *value["seen"].values())
    if not all(map(is_count, counts)):
        raise ValueError("a generation is no number")
    ancestors = split_ids(value["ancestors"])
    if not all(map(is_id, (*ancestors, value["commit_id"]))):
        raise ValueError("a commit is no commit")
    return RemoteDirectory(
        value["generation"], value["commit_id"], ancestors, value["seen"], segments
    )


def state_numbers(objects: Objects) -> list[int]:
    """Return the numbers of all states, ascending."""
    return document_numbers(objects, STATES)


def newest_state(objects: Objects) -> RemoteState | None:
    """Read the newest state; None: there is none.

    Raises:
        DamageError: it is not as written.
        RemoteError: it was removed by others.
    """
    found = newest_document(objects, STATES)
    return None if found is None else RemoteState.from_bytes(found[1], state_key(found[0]))


def read_state(objects: Objects, number: int) -> RemoteState | None:
    """Read the state of a number; None: there is none, or it is not as written."""
    key = state_key(number)
    try:
        return RemoteState.from_bytes(objects.read(key), key)
    except (FileNotFoundError, StoreError):
        return None
