"""Which snapshots a shard's live segments came from, also after compaction.

A chain is a shard's segments from a base on. Its *digest* covers the name and the header's checksum
of each segment that a snapshot wrote. A merged segment lists those that it took, so compaction
changes no digest. Snapshot numbers alone do not identify a state: after a roll-back they are used
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpr_ext.errors import DamageError
from cpr_ext.storage.file_names import parse_segment_name
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_format import Segment

FIELD = "merged_history"  # of a merged segment's header
START = ""  # the digest before a base
# A merged base keeps so many of its sources; a merged segment without a base at most as many.
MOST_SOURCES = 256


class SegmentIdentity(NamedTuple):
    """A segment that a snapshot wrote: its file name and the CRC32C of its header."""

    file: str
    header_crc32c: int


@dataclass(frozen=True)
class SegmentHistory:
    """The sources of a segment.

    Attributes:
        before: digest of sources that are no longer listed; ``START``: all are.
        sources: the newest, oldest first; of a segment that no compaction made: itself.
    """

    before: str
    sources: tuple[SegmentIdentity, ...]


def digest_after(digest: str, source: SegmentIdentity) -> str:
    """Return the digest of a chain that continues with ``source``."""
    text = f"{digest} {source.file} {source.header_crc32c:08x}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def history_of(record: SegmentRecord, segment: Segment) -> SegmentHistory:
    """Return the history of a live segment.

    Raises:
        DamageError: its header describes none that can be.
    """
    itself = SegmentHistory(START, (SegmentIdentity(record.file, record.header_crc32c),))
    noted = segment.metadata.get(FIELD)
    if noted is None:
        return itself
    try:
        before = noted["before"]
        sources = tuple(SegmentIdentity(str(file), int(crc, 16)) for file, crc in noted["sources"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"{segment.path}: its history cannot be read ({error!r:.100})") from error
    named = all(parse_segment_name(source.file) for source in sources)
    if not sources or not named or not isinstance(before, str):
        raise DamageError(f"{segment.path}: its history names no segments")
    return SegmentHistory(before, sources)


def merged_history(
    read: Sequence[tuple[SegmentRecord, Segment]], *, has_base: bool
) -> Mapping[str, Any]:
    """Return what the header of a merged segment notes of the segments that it takes.

    Args:
        read: these, oldest first.
        has_base: a base is the first of them.
    """
    histories = [history_of(record, segment) for record, segment in read]
    sources = [source for history in histories for source in history.sources]
    before = histories[0].before if histories else START
    dropped = sources[:-MOST_SOURCES]
    if dropped and not has_base:
        return {}  # what came before it is not known here: it counts as a segment of its own
    for source in dropped:
        before = digest_after(before, source)
    kept = [[source.file, f"{source.header_crc32c:08x}"] for source in sources[-MOST_SOURCES:]]
    return {FIELD: {"before": before, "sources": kept}}


def chain_digests(histories: Sequence[SegmentHistory]) -> Iterator[tuple[int, bool, str]]:
    """Yield the digest after each source of a chain.

    Yields:
        The segment's index in ``histories``, whether the source is its last one, and the digest.
    """
    digest = histories[0].before if histories else START
    for index, history in enumerate(histories):
        for number, source in enumerate(history.sources, 1):
            digest = digest_after(digest, source)
            yield index, number == len(history.sources), digest
