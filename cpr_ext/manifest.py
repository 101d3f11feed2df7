"""The manifest: what is committed in one directory, replaced as a whole by one atomic rename."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StorageError, StoreError

FORMAT_VERSION = 1
MANIFEST_FILE = "MANIFEST.json"
TEMPORARY_SUFFIX = ".tmp"

Kind = Literal["base", "partial", "merged", "dense"]
_SEGMENT_NAME = re.compile(r"(\d{8,})-(base|partial|merged|dense)\.safetensors", re.ASCII)


def segment_name(snapshot: int, kind: str) -> str:
    """File name of a segment; names sort in the order of snapshots."""
    return f"{snapshot:08d}-{kind}.safetensors"


def parse_segment_name(name: str) -> tuple[int, str] | None:
    """Inverse of :func:`segment_name`; None for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    if match is None or name != segment_name(int(match[1]), match[2]):
        return None
    return int(match[1]), match[2]


@dataclass(frozen=True)
class SegmentRecord:
    """What a manifest says of one segment.

    Attributes:
        file: name inside the manifest's directory; never a path.
        kind: ``base`` (all rows of the shard), ``partial`` (selected rows), ``merged`` (the rows of
            several partial ones) or ``dense``.
        snapshot: number of the snapshot; newer ones are higher.
        first_step, last_step: the steps at which its rows were captured.
        num_samples: samples trained when the last of them was captured.
        file_bytes, header_bytes, header_crc32c: how to read and check it.
        is_complete: dense only. Every row of every shard, as it was at ``last_step``, is in the
            snapshots up to this one: a full-recovery point.
    """

    file: str
    kind: Kind
    snapshot: int
    first_step: int
    last_step: int
    num_samples: int
    file_bytes: int
    header_bytes: int
    header_crc32c: int
    is_complete: bool = False

    def __post_init__(self) -> None:
        if parse_segment_name(self.file) != (self.snapshot, self.kind):
            raise ValueError(f"{self.file!r} does not name {self.kind} segment {self.snapshot}")


class Manifest:
    """The live segments of one directory, oldest first.

    Raises:
        DamageError: the file is not what was committed.
        StoreError: it has a format version not known here.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.segments: tuple[SegmentRecord, ...] = ()
        content = read_signed(directory / MANIFEST_FILE, "cpr_ext.manifest")
        if content is None:
            return
        try:
            self.segments = tuple(SegmentRecord(**record) for record in content["segments"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"{directory / MANIFEST_FILE}: {error}") from error

    def commit(self, segments: tuple[SegmentRecord, ...]) -> None:
        """Make ``segments`` the live ones; once this returns they are, whatever happens next.

        The files of those no longer live are removed afterwards.
        """
        # The directory entries of new segment files must be durable before a manifest names them.
        sync_directory(self.directory)
        content = {"segments": [asdict(record) for record in segments]}
        write_signed(self.directory / MANIFEST_FILE, "cpr_ext.manifest", content)
        dropped = set(self.segments) - set(segments)
        self.segments = segments
        for record in dropped:
            # A file that cannot be removed costs space, not safety; the next open tries again.
            with suppress(OSError):
                self.path_of(record).unlink()

    def path_of(self, record: SegmentRecord) -> Path:
        """The file of a segment."""
        return self.directory / record.file

    def remove_unlisted(self) -> None:
        """Remove segments that no manifest names and temporary files: leavings of a crash."""
        live = {record.file for record in self.segments}
        for path in self.directory.iterdir():
            left_over = parse_segment_name(path.name) is not None and path.name not in live
            if left_over or path.name == MANIFEST_FILE + TEMPORARY_SUFFIX:
                path.unlink(missing_ok=True)


def write_signed(path: Path, format_name: str, content: dict[str, Any]) -> None:
    """Replace ``path`` atomically and durably by ``content`` with its checksum.

    Raises:
        StorageError: the operating system refused; the old file is intact.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(_serialize(format_name, FORMAT_VERSION, content))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise storage_error("write", path, error) from error
    sync_directory(path.parent)


def read_signed(path: Path, format_name: str) -> dict[str, Any] | None:
    """Content written by :func:`write_signed`, or None if there is no such file.

    Raises:
        DamageError: any byte of it differs from what was written.
        StoreError: it has a format version not known here.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("read", path, error) from error
    try:
        document = json.loads(text)
        version = document["format_version"]
        content = document["content"]
        expected = _serialize(format_name, version, content)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamageError(f"{path}: not a {format_name} file ({error!r})") from error
    if text != expected or not isinstance(content, dict):
        raise DamageError(f"{path}: its checksum differs from its content")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path}: format version {version}; this release reads {FORMAT_VERSION}. "
            "Use the release that wrote the store, or a newer one"
        )
    return content


def _serialize(format_name: str, version: int, content: dict[str, Any]) -> bytes:
    signed = json.dumps([format_name, version, content], sort_keys=True, separators=(",", ":"))
    document = {
        "format": format_name,
        "format_version": version,
        "crc32c": f"{native.crc32c(signed.encode()):08x}",
        "content": content,
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def sync_directory(directory: Path) -> None:
    """Make the entries of ``directory`` durable."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error("sync", directory, error) from error


def make_directory(directory: Path) -> None:
    """Make ``directory`` and its parents, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing or [directory]:
        sync_directory(path.parent)


def storage_error(operation: str, path: Path, error: OSError) -> StorageError:
    """``error`` with what was tried on what, as this library raises it."""
    return StorageError(
        error.errno, f"cannot {operation} '{path}': {error.strerror or error}", str(path)
    )
