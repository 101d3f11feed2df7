"""Descent: which state follows from which. Pure functions; nothing is read or written here.

    chain    of a directory, after each segment: a digest of all that snapshots have written there
    commit   of a manifest: a digest of all manifests that this directory ever had

Each dense part records the chain that every shard had when it was committed. So it is known without
numbers whether the rows that a shard holds are those of that snapshot. Numbers alone do not show
it: after a roll-back, or in a copy of a store, they are used again.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

NO_ID = ""
WIDEST_ID = "f" * 32
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Recorded(Protocol):
    """What a manifest says of a segment, as far as its descent goes."""

    @property
    def snapshot(self) -> int:
        """The number of the snapshot that wrote it; merged: of the last one."""

    @property
    def chain(self) -> str:
        """Of its directory, once it was written."""

    @property
    def shards(self) -> tuple[str, ...]:
        """Of a dense part: the chain of each shard when it was committed."""


def new_id() -> str:
    """Return a random identity, such as of a store: every chain begins with it."""
    return uuid.uuid4().hex


def is_id(value: Any) -> bool:
    """Return whether it is an identity, a chain or a commit."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def split_ids(listed: str) -> tuple[str, ...]:
    """Return the identities of a text that holds nothing else."""
    size = len(WIDEST_ID)
    return tuple(listed[at : at + size] for at in range(0, len(listed), size))


def chain_after(chain: str, file: str, header: bytes) -> str:
    """Return the chain of a directory that gets a segment of this name and header.

    A header has the checksums of all that the segment holds.
    """
    return _digest(chain.encode(), file.encode(), header)


def commit_after(commit: str, directory: str, segments: Iterable[Any], nonce: str) -> str:
    """Return the commit of a manifest that follows ``commit``.

    Args:
        nonce: random, so that two processes that do the same make two commits.
    """
    listed = json.dumps([directory, list(segments), nonce], sort_keys=True)
    return _digest(commit.encode(), listed.encode())


def _digest(*parts: bytes) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()[: len(WIDEST_ID)]


def position_of(chain: str, records: Sequence[Recorded], start: str) -> int | None:
    """Return how many of a directory's segments make its state at ``chain``; None: it has not it.

    Args:
        start: the chain of a directory without segments: the store's identity.
    """
    if chain == start:
        return 0
    return next((n for n, record in enumerate(records, 1) if record.chain == chain), None)


def shards_without(
    dense: Recorded, shards: Sequence[Sequence[Recorded]], start: str
) -> tuple[int, ...]:
    """Return the shards that do not hold the state of a snapshot: they are older, or others.

    What follows its state in a shard is of later snapshots. Others show another history: of a
    snapshot that changed no row of the shard, its chain does not.
    """
    if len(dense.shards) != len(shards):
        return tuple(range(len(shards)))

    def holds_it(chain: str, records: Sequence[Recorded]) -> bool:
        position = position_of(chain, records, start)
        return position is not None and all(
            record.snapshot > dense.snapshot for record in records[position:]
        )

    pairs = enumerate(zip(dense.shards, shards, strict=True))
    return tuple(n for n, (chain, of_shard) in pairs if not holds_it(chain, of_shard))
