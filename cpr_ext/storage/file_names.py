"""The names of all files in a store or next to it: only this module makes or reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

MANIFEST_FILE = "MANIFEST.json"
PREVIOUS_FILE = "MANIFEST.prev"  # the one before, for ``cpr repair``
LOCK_FILE = "LOCK"
SEGMENTS_DIRECTORY = "segments"
# A copy is being read into this directory, or was: its manifest, until all segments are there.
FETCHING_FILE = MANIFEST_FILE + ".fetching"
TEMPORARY_SUFFIX = ".tmp"  # of a file that is about to replace another

Kind = Literal["base", "partial", "dense"]
_NO_STORE = frozenset(
    (
        *(LOCK_FILE, FETCHING_FILE, MANIFEST_FILE + TEMPORARY_SUFFIX),
        FETCHING_FILE + TEMPORARY_SUFFIX,
        "lost+found",  # of a file system, at its mount point
    )
)
_WORKER_NAME = re.compile(r"worker-(\d{5,})-of-(\d{5,})", re.ASCII)
_SEGMENT_NAME = re.compile(r"(\d{8,})-(base|partial|dense)\.safetensors", re.ASCII)


def segment_name(snapshot: int, kind: str) -> str:
    """Return the file name of a segment; names sort in the order of snapshots."""
    return f"{snapshot:08d}-{kind}.safetensors"


def parse_segment_name(name: str) -> tuple[int, str] | None:
    """Invert :func:`segment_name`; None for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    if match is None:
        return None
    parsed = int(match[1]), match[2]
    return parsed if name == segment_name(*parsed) else None


def worker_name(rank: int, world_size: int) -> str:
    """Return the directory name of the store of one worker; ``rank`` counts from 0."""
    return f"worker-{rank:05d}-of-{world_size:05d}"


def parse_worker_name(name: str) -> tuple[int, int] | None:
    """Invert :func:`worker_name`; None for any other name."""
    match = _WORKER_NAME.fullmatch(name)
    if match is None or name != worker_name(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])


def is_store(names: Iterable[str]) -> bool:
    """Return whether a directory with these names is a store, also a damaged one."""
    return not {MANIFEST_FILE, PREVIOUS_FILE, SEGMENTS_DIRECTORY}.isdisjoint(names)


def names_in_the_way(names: Iterable[str]) -> list[str]:
    """Return the names, sorted, that keep a directory from becoming a new store.

    What a read of a copy has left that was cut off does not.
    """
    found = set(names)
    if FETCHING_FILE in found and MANIFEST_FILE not in found:
        found.discard(SEGMENTS_DIRECTORY)
    return sorted(found - _NO_STORE)
