"""What of a store's directories is sound: read whole, chunk by chunk, for a repair.

A directory whose manifest is sound holds what the manifest says. Where the manifest is of no use,
it holds the segments whose own headers show what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.verify import Expected, check_dense, check_rows
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.storage.file_names import MANIFEST_FILE, parse_segment_name
from cpr_ext.storage.lineage import chain_after
from cpr_ext.storage.manifest import Manifest, SegmentRecord
from cpr_ext.storage.retries import list_directory
from cpr_ext.storage.segment_header import read_own_record
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import open_segment

_RANK = {"base": 2, "merged": 1, "partial": 0, "dense": 0}


@dataclass(frozen=True)
class Held:
    """A segment, and what of it is sound.

    Attributes:
        record: from the manifest, or from its own header.
        reason: what is wrong; empty: nothing.
        rows: of a shard's segment with some sound chunks.
        damaged: numbers of the chunks that are not sound.
        is_replaced: a repair that was interrupted wrote the file, and no manifest names that yet.
    """

    record: SegmentRecord
    reason: str = ""
    rows: SegmentRows | None = None
    damaged: frozenset[int] = frozenset()
    is_replaced: bool = False

    @property
    def is_sound(self) -> bool:
        """True if every byte is as committed."""
        return not self.reason

    def row_ids(self, table: str) -> list[torch.Tensor]:
        """Return row ids (n,) int64 of the sound chunks of a table."""
        if self.rows is None:
            return []
        sound = (c for c in self.rows.chunks_of(table) if c not in self.damaged)
        return [self.rows.row_ids(chunk) for chunk in sound]


@dataclass
class Directory:
    """A directory of a store, and what was found in it.

    Attributes:
        manifest: the one to commit to; without segments if the file is of no use.
        wrong: why the file is of no use; empty: it is sound.
        held: its segments, oldest first.
        useless: files that show nothing, and why; only where the manifest is of no use.
        has_replaced: an interrupted repair has replaced a file of it.
    """

    manifest: Manifest
    wrong: str = ""
    held: list[Held] = field(default_factory=list)
    useless: dict[Path, str] = field(default_factory=dict)
    has_replaced: bool = False

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.manifest.directory


def read_manifests(directories: Sequence[Path], store_id: str) -> list[Directory]:
    """Return the manifests, each with its fault; a stale one is of no use."""
    found: dict[Path, Directory] = {}
    for path in directories:
        try:
            manifest = Manifest(path, store_id=store_id)
            manifest.require_room(MAX_SOUND)
        except DamageError as error:
            found[path] = Directory(Manifest.rebuilt(path, 0, store_id), str(error))
            continue
        wrong = "" if manifest.is_recorded else f"{path / MANIFEST_FILE} is missing"
        found[path] = Directory(manifest, wrong)
    sound = [directory.manifest for directory in found.values() if not directory.wrong]
    for directory in found.values():
        known = max((other.seen.get(directory.path.name, 0) for other in sound), default=0)
        if not directory.wrong and known > directory.manifest.generation:
            directory.wrong = (
                f"{directory.path / MANIFEST_FILE} is generation "
                f"{directory.manifest.generation}, another has seen {known}"
            )
        if directory.wrong:
            generation = max(known, directory.manifest.generation)
            directory.manifest = Manifest.rebuilt(directory.path, generation, store_id)
    return list(found.values())


def survey(directory: Directory, expected: Expected | None) -> None:
    """Read every segment of a directory.

    Args:
        expected: what a shard holds; None: this is the directory of dense parts.

    Raises:
        StorageError: a file could not be read, which says nothing of what it holds.
    """
    records = directory.manifest.segments or _own_records(directory, is_dense=expected is None)
    for record in records:
        held = _look(directory.manifest, record, expected)
        if directory.has_replaced:  # as the interrupted repair recorded it
            chain = directory.held[-1].record.chain
            held = replace(held, record=with_chain_after(chain, held.record))
        directory.has_replaced |= held.is_replaced
        directory.held.append(held)


def with_chain_after(chain: str, record: SegmentRecord) -> SegmentRecord:
    """Return the record of a segment that stays where the state before it has changed."""
    after = chain_after(chain, record.file, record.chain.encode())
    return replace(record, chain_before=chain, chain=after)


def keep_descent(directory: Directory, chains: Sequence[str]) -> None:
    """Keep of a directory without a manifest only segments of one history, if they show one.

    Args:
        chains: that it may have reached, the likeliest first; then those of its own segments.
    """
    by_chain: dict[str, Held] = {}
    for held in sorted(directory.held, key=lambda held: _RANK[held.record.kind]):
        by_chain[held.record.chain] = held
    own = [held.record.chain for held in reversed(directory.held)]
    for chain in (*chains, *own):
        path: list[Held] = []
        while chain in by_chain and by_chain[chain] not in path:
            path.insert(0, by_chain[chain])
            chain = path[0].record.chain_before
        if chain == directory.manifest.store_id or any(h.record.kind == "base" for h in path):
            directory.held = path
            return


def _own_records(directory: Directory, *, is_dense: bool) -> list[SegmentRecord]:
    """Return the segments that identify themselves, oldest first, one of each snapshot."""
    best: dict[int, SegmentRecord] = {}
    if not directory.wrong:
        return []
    for path in list_directory(directory.path):
        name = parse_segment_name(path.name)
        if name is None or (name[1] == "dense") != is_dense:
            continue
        try:
            record = read_own_record(path)
        except DamageError as error:
            directory.useless[path] = str(error)
            continue
        known = best.get(record.snapshot)
        if known is None or _RANK[known.kind] < _RANK[record.kind]:
            best[record.snapshot] = record
    return [best[snapshot] for snapshot in sorted(best)]


def _look(manifest: Manifest, record: SegmentRecord, expected: Expected | None) -> Held:
    try:
        _check(manifest, record, expected)
        if expected is None:
            return Held(record)
        return Held(record, rows=_open(manifest, record, expected.ranges))
    except DamageError as error:
        reason = str(error)
    try:
        # A repair that was interrupted has replaced the file, and not yet the manifest.
        own = read_own_record(manifest.path_of(record))
        _check(manifest, own, expected)
        rows = None if expected is None else _open(manifest, own, expected.ranges)
        return Held(own, rows=rows, is_replaced=True)
    except (DamageError, FileNotFoundError, NotADirectoryError):
        pass
    if expected is None:
        return Held(record, reason)
    return _sound_part(manifest, record, expected, reason)


def _check(manifest: Manifest, record: SegmentRecord, expected: Expected | None) -> None:
    if expected is None:
        check_dense(manifest, record)
    else:
        check_rows(manifest, record, expected)


def _open(
    manifest: Manifest, record: SegmentRecord, ranges: Mapping[str, tuple[int, int]]
) -> SegmentRows:
    return SegmentRows(open_segment(manifest, record), dict(ranges))


def _sound_part(manifest: Manifest, record: SegmentRecord, expected: Expected, reason: str) -> Held:
    try:
        rows = _open(manifest, record, expected.ranges)
    except DamageError:
        return Held(record, reason)
    damaged = set()
    for chunk in range(len(rows.segment.chunks)):
        try:
            rows.rows(chunk)
        except DamageError:
            damaged.add(chunk)
    if not damaged or len(damaged) == len(rows.segment.chunks):
        return Held(record, reason)  # none is sound, or it is not what a store of these tables has
    return Held(record, reason, rows, frozenset(damaged))
