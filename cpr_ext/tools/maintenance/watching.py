"""How far the snapshots of a running job are: what an operator looks at while it trains."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cpr_ext.errors import CprError
from cpr_ext.storage.file_names import MANIFEST_FILE
from cpr_ext.storage.filesystem import storage_error
from cpr_ext.storage.job_stores import find_stores
from cpr_ext.storage.store_reader import StoreReader, read_committed


@dataclass(frozen=True)
class SnapshotStanding:
    """The newest snapshot of one worker's store.

    Attributes:
        worker: its rank, or the name of its store.
        snapshot: its number; 0: none was committed as a whole.
        step, num_samples: of training when it was captured.
        committed_at: when the store was last changed, seconds since the epoch; None: not known.
        interval_seconds: between the two newest snapshots; None: not known.
        full_step, proven_step: of the newest full-recovery point, and of the newest that is proven;
            None: there is none.
        file_bytes: of all live segments.
        trouble: why the store cannot be read; all else is 0 or None then.
    """

    worker: int | str
    snapshot: int = 0
    step: int = 0
    num_samples: int = 0
    committed_at: float | None = None
    interval_seconds: float | None = None
    full_step: int | None = None
    proven_step: int | None = None
    file_bytes: int = 0
    trouble: str | None = None


def watch(job: str | os.PathLike[str], *, world_size: int | None = None) -> list[SnapshotStanding]:
    """Return the standing of each store of a job, or of one store; reads manifests only.

    A store that cannot be read is reported, and hides no other.

    Args:
        world_size: of a directory with jobs of several sizes, the one of so many workers.

    Raises:
        StoreError: there is no store.
        StorageError: the directory cannot be read.
    """
    found = find_stores(job, world_size=world_size)
    standings = []
    for worker, store in zip(found.workers, found.stores, strict=True):
        try:
            standings.append(read_committed(store, partial(_standing, worker)))
        except CprError as error:
            standings.append(SnapshotStanding(worker, trouble=str(error)))
    missing = [SnapshotStanding(name, trouble="the store is missing") for name in found.missing]
    return standings + missing


def _standing(worker: int | str, reader: StoreReader) -> SnapshotStanding:
    points = reader.dense.segments
    live = [record for manifest in (reader.dense, *reader.shards) for record in manifest.segments]
    if not points:
        return SnapshotStanding(worker, file_bytes=sum(record.file_bytes for record in live))
    path = reader.dense.directory / MANIFEST_FILE
    try:
        committed_at = path.stat().st_mtime
    except OSError as error:
        raise storage_error("look at", path, error) from error
    interval = None
    with suppress(OSError, ValueError):  # a file is gone, or there is one snapshot
        records = [(record, each) for each in reader.shards for record in each.segments]
        # A merge writes its file whenever it likes.
        files = {r.snapshot: each.path_of(r) for r, each in records if r.kind != "merged"}
        before, newest = (files[number].stat().st_mtime for number in sorted(files)[-2:])
        interval = newest - before
    return SnapshotStanding(
        worker,
        points[-1].snapshot,
        points[-1].last_step,
        points[-1].num_samples,
        committed_at,
        interval,
        max((point.last_step for point in points if point.is_complete), default=None),
        max((point.last_step for point in points if point.is_proven), default=None),
        sum(record.file_bytes for record in live),
    )
