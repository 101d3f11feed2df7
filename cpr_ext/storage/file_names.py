"""The names of all files in a store or next to it: only this module makes or reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

STORE_FILE = "STORE.json"
STORE_COPY_FILE = "STORE.copy.json"
MANIFEST_FILE = "MANIFEST.json"
LOCK_FILE = "LOCK"
# A copy is being read into this directory, or was: the description, until all else is there.
FETCHING_FILE = "STORE.json.fetching"
DENSE_DIRECTORY = "dense"
BACKUPS_DIRECTORY = "backups"  # which commits backups hold
TEMPORARY_SUFFIX = ".tmp"  # of a file that is about to replace another

Kind = Literal["base", "partial", "merged", "dense"]
_NO_STORE = frozenset(
    (
        *(LOCK_FILE, FETCHING_FILE, STORE_FILE + TEMPORARY_SUFFIX),
        FETCHING_FILE + TEMPORARY_SUFFIX,
        "lost+found",  # of a file system, at its mount point
    )
)
_SHARD_NAME = re.compile(r"shard-(\d{5,})", re.ASCII)
_WORKER_NAME = re.compile(r"worker-(\d{5,})-of-(\d{5,})", re.ASCII)
_SEGMENT_NAME = re.compile(r"(\d{8,})-(base|partial|merged|dense)\.safetensors", re.ASCII)


def segment_name(snapshot: int, kind: str) -> str:
    """Return the file name of a segment; names sort in the order of snapshots."""
    return f"{snapshot:08d}-{kind}.safetensors"


def parse_segment_name(name: str) -> tuple[int, str] | None:
    """Invert :func:`segment_name`; None for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    if match is None or name != segment_name(int(match[1]), match[2]):
        return None
    return int(match[1]), match[2]


def shard_name(shard: int) -> str:
    """Return the directory name of a shard; ``shard`` counts from 0."""
    return f"shard-{shard:05d}"


def parse_shard_name(name: str) -> int | None:
    """Invert :func:`shard_name`; None for any other name."""
    match = _SHARD_NAME.fullmatch(name)
    if match is None or name != shard_name(int(match[1])):
        return None
    return int(match[1])


def worker_name(rank: int, world_size: int) -> str:
    """Return the directory name of the store of one worker; ``rank`` counts from 0."""
    return f"worker-{rank:05d}-of-{world_size:05d}"


def parse_worker_name(name: str) -> tuple[int, int] | None:
    """Invert :func:`worker_name`; None for any other name."""
    match = _WORKER_NAME.fullmatch(name)
    if match is None or name != worker_name(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])


def is_store_directory(name: str) -> bool:
    """Return whether a directory of a store is named so."""
    return name == DENSE_DIRECTORY or parse_shard_name(name) is not None


def is_own_name(name: str) -> bool:
    """Return whether a file or directory of this name in a store is the store's own."""
    files = (STORE_FILE, STORE_COPY_FILE, BACKUPS_DIRECTORY)
    temporary = [file + TEMPORARY_SUFFIX for file in files]
    return name in _NO_STORE or name in (*files, *temporary) or is_store_directory(name)


def names_in_the_way(names: Iterable[str]) -> list[str]:
    """Return the names, sorted, that keep a directory from becoming a new store.

    What a read of a copy has left that was cut off does not.
    """
    found = set(names)
    if FETCHING_FILE in found and STORE_FILE not in found:
        found = {name for name in found if not is_store_directory(name)}
    return sorted(found - _NO_STORE)
