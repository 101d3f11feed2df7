"""Which states a shard's live segments pass through, also after compaction.

A merged segment has the chain of its newest source, so compaction changes no chain. It lists those
of its other sources: a consumer that holds one of these states then finds its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpr_ext.errors import DamageError
from cpr_ext.storage.lineage import is_id
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.segment_format import Segment

CHAINS = "merged_chains"  # of a merged segment's header
MOST_CHAINS = 256  # so many are listed, the newest


def chains_of(record: SegmentRecord, segment: Segment) -> tuple[str, ...]:
    """Return the chain after each source of a live segment, as far as they are listed.

    The last is its own.

    Raises:
        DamageError: its header lists none that can be.
    """
    listed = segment.metadata.get(CHAINS, [])
    if not isinstance(listed, list) or not all(map(is_id, listed)):
        raise DamageError(f"{segment.path}: its history names no chains")
    return (*listed, record.chain)


def merged_chains(read: Sequence[SegmentRecord], opened: Sequence[Segment]) -> list[str]:
    """Return what the header of a merged segment lists, which takes these, oldest first."""
    pairs = zip(read, opened, strict=True)
    chains = [chain for record, segment in pairs for chain in chains_of(record, segment)]
    return chains[max(0, len(chains) - 1 - MOST_CHAINS) : -1]
