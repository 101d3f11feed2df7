"""Small JSON files with a version and a checksum, replaced as a whole by one atomic rename."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError
from cpr_ext.storage.file_names import TEMPORARY_SUFFIX
from cpr_ext.storage.filesystem import create_anew, read_whole, storage_error, sync_directory
from cpr_ext.storage.retries import retrying

FORMAT_VERSION = 1
MAX_BYTES = 64 << 20
REPAIR_HINT = ". `cpr repair` shows what can be rebuilt"
# A larger one must come with files: it takes memory of many times its size to read.
FREE_BYTES = 2 << 20
_BYTES_DESCRIBED = 16  # a byte of JSON describes at least so many of the files around it
_NO_CHECKSUM = "00000000"  # in the place of a document's own, while it is computed


def write_checksummed(
    path: Path,
    format_name: str,
    content: str,
    *,
    previous: Path | None = None,
) -> None:
    """Replace ``path`` atomically and durably by ``content``, which is JSON, with its checksum.

    Args:
        previous: name for the file that is replaced; where the file system has no hard links it
            does without.

    Raises:
        StorageError: the operating system refused; the old file is intact.
        StoreError: it would be larger than what is read again.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    document = serialize_document(format_name, content)
    if len(document) > MAX_BYTES:
        raise StoreError(
            f"'{path}' would have {len(document)} bytes; at most {MAX_BYTES} are read again. If it "
            "lists too many segments, keep fewer points (Retention) or save a base sooner "
            "(rebase_after)"
        )
    try:
        temporary.unlink(missing_ok=True)
        with os.fdopen(create_anew(temporary), "wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None:
            _keep(path, previous)
        temporary.replace(path)
    except OSError as error:
        raise storage_error("write", path, error) from error
    sync_directory(path.parent)


def _keep(path: Path, previous: Path) -> None:
    """Let ``previous`` be a second name of ``path``, if there can be one."""
    with suppress(OSError):
        previous.unlink(missing_ok=True)
        os.link(path, previous, follow_symlinks=False)


def read_checksummed(
    path: Path, format_name: str, *, free_bytes: int = FREE_BYTES
) -> dict[str, Any] | None:
    """Read what :func:`write_checksummed` wrote; None if there is no such file.

    Args:
        free_bytes: a larger file is read only if the files around it justify its size.

    Raises:
        DamageError: any byte of it differs from what was written, or it is no regular file.
        StoreError: it has another format version.
        StorageError: the operating system refused to read.
    """
    try:
        text = retrying(path, lambda: read_whole(path, _allowed_bytes(path, free_bytes)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse_document(text, str(path), format_name)


def parse_document(text: bytes, place: str, format_name: str) -> dict[str, Any]:
    """Return the content of a document that was read from ``place``.

    Raises:
        DamageError: any byte of it differs from what was written.
        StoreError: it has another format version.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
        version, content, checksum = (
            document[name] for name in ("format_version", "content", "crc32c")
        )
        is_format = document["format"] == format_name
        unsigned = _with_checksum(text, _NO_CHECKSUM, of=checksum)
        is_as_written = f"{native.crc32c(unsigned):08x}" == checksum
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(
            f"{place}: not a {format_name} file ({error!r:.200}){REPAIR_HINT}"
        ) from error
    if not is_as_written:
        raise DamageError(f"{place}: its checksum differs from its content{REPAIR_HINT}")
    if not is_format or not isinstance(content, dict) or type(version) is not int:
        raise DamageError(f"{place}: not a {format_name} file{REPAIR_HINT}")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{place}: format version {version}; this release reads {FORMAT_VERSION}. "
            "Use the release that wrote the store, or a newer one"
        )
    return content


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _allowed_bytes(path: Path, free_bytes: int) -> int:
    """Return how large a file may be, given the files in and below its directory."""
    if os.lstat(path).st_size <= free_bytes:
        return free_bytes
    beside = [entry for entry in os.scandir(path.parent) if entry.name != path.name]
    files = [entry for entry in beside if entry.is_file(follow_symlinks=False)]
    for entry in beside:
        if entry.is_dir(follow_symlinks=False):
            files += [e for e in os.scandir(entry.path) if e.is_file(follow_symlinks=False)]
    held = 0
    for file in files:
        status = file.stat(follow_symlinks=False)
        held += min(status.st_size, 512 * status.st_blocks)  # not its holes
    return min(MAX_BYTES, free_bytes + held // _BYTES_DESCRIBED)


def serialize_document(format_name: str, content: str) -> bytes:
    """Return the text of a document whose content is this JSON, its checksum included."""
    text = (
        f'{{"format":"{format_name}","format_version":{FORMAT_VERSION},'
        f'"crc32c":"{_NO_CHECKSUM}",\n"content":{content}}}\n'
    ).encode()
    return _with_checksum(text, f"{native.crc32c(text):08x}", of=_NO_CHECKSUM)


def _with_checksum(text: bytes, checksum: str, *, of: str) -> bytes:
    """Return a document with another value in the place of its own checksum ``of``."""
    # The first of its kind: what comes from users follows later.
    old, new = (f'"crc32c":"{each}"'.encode() for each in (of, checksum))
    return text.replace(old, new, 1)
