"""What a remote store holds: one document that names all objects of a committed state.

    HEAD                                              which state is there; replaced as a whole
    objects/00000003-00000-base.safetensors.4f1c...   a segment, and the id of its snapshot

All objects that HEAD names were there before it named them. Objects of the states before stay for a
while, for those who read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpr_ext.errors import DamageError
from cpr_ext.storage.checksummed_json import parse_document, serialize_document
from cpr_ext.storage.file_names import SEGMENTS_DIRECTORY
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.wings.remote.head import HEAD, Head
from cpr_ext.wings.remote.objects import Objects

OBJECTS = "objects/"
FORMAT_NAME = "cpr_ext.remote"


def object_key(record: SegmentRecord) -> str:
    """Return the name of a segment's object: another segment has another one."""
    return f"{OBJECTS}{record.file}.{record.id}"


def objects_of(manifest: Manifest) -> dict[str, SegmentRecord]:
    """Return the segments of a state by the names of their objects."""
    return {object_key(record): record for record in manifest.records()}


def step_of(manifest: Manifest) -> int:
    """Return the step of the newest snapshot; -1: there is none."""
    return -1 if manifest.newest is None else manifest.newest.last_step


def saved_at(manifest: Manifest, store: Path) -> float:
    """Return when the newest dense part of a store was written, in Unix seconds; 0: it is gone."""
    with suppress(OSError):
        if manifest.newest is not None:
            return (store / SEGMENTS_DIRECTORY / manifest.newest.file).stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class RemoteState:
    """A state of a remote store.

    Attributes:
        writer: identifies the process that wrote it.
        manifest: what it holds.
        unix_seconds: when its newest snapshot was saved, by that machine's clock; 0: there is none.
        checksums: CRC32C of each object's bytes, by its name.
        retired: objects that no state names any more, and since when, by the writer's clock.
    """

    writer: str
    manifest: Manifest
    unix_seconds: float
    checksums: Mapping[str, int]
    retired: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Of the newest snapshot; -1: there is none."""
        return step_of(self.manifest)

    def to_bytes(self) -> bytes:
        """Return the document."""
        others = {
            "writer": self.writer,
            "unix_seconds": self.unix_seconds,
            "checksums": dict(self.checksums),
            "retired": dict(self.retired),
        }
        text = json.dumps(others, separators=(",", ":"))
        return serialize_document(FORMAT_NAME, f'{text[:-1]},"manifest":{self.manifest.text}}}')

    @classmethod
    def from_bytes(cls, data: bytes) -> RemoteState:
        """Invert :meth:`to_bytes`.

        Raises:
            DamageError: any byte of it is not as written.
            StoreError: a version not known here.
        """
        content = parse_document(data, HEAD, FORMAT_NAME)
        manifest = Manifest.from_content(content.get("manifest"), HEAD)
        try:
            state = cls(
                str(content["writer"]),
                manifest,
                _seconds(content["unix_seconds"]),
                {str(key): int(crc) for key, crc in content["checksums"].items()},
                {str(key): _seconds(since) for key, since in content["retired"].items()},
            )
            if objects_of(manifest).keys() - state.checksums.keys():
                raise ValueError("it names objects without a checksum")
        except Exception as error:  # of whatever a document may hold
            raise DamageError(f"{HEAD}: {error!r:.200}") from error
        return state


def _seconds(value: Any) -> float:
    """Return Unix seconds, of which the system can make a file's time."""
    if not 0 <= (seconds := float(value)) < 2**40:
        raise ValueError(f"{value!r:.100} is no time")
    return seconds


def newest_state(objects: Objects) -> RemoteState | None:
    """Read the state that is there; None: there is none.

    Raises:
        DamageError: it is not as written.
        RemoteError: a request failed.
    """
    data = Head(objects).read()
    return None if data is None else RemoteState.from_bytes(data)
