"""Compaction in a background thread.

Merging reads the live files and writes next to them for as long as it takes. Only the swap of the
manifest runs on the committer's thread, which checks that the merged segments are still live.
"""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Sequence
from functools import partial

from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.runtime.threads import close_at_exit
from cpr_ext.state.table import Table, shard_row_range
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.manifest import SegmentRecord
from cpr_ext.storage.merge import MergeLimits, commit_merged, write_merged
from cpr_ext.storage.merge_plan import Merge, plan_merges, recovery_points
from cpr_ext.storage.segment_writer import Pace
from cpr_ext.storage.store import Store

logger = logger_of("saving")


class Compactor:
    """Merges a shard's segments once they have grown enough.

    Args:
        row_ranges: of each shard: rows [begin, end) by table.
        after: a merge is due once the segments that it adds to its oldest one exceed this many
            times the bytes of the shard's base.
    """

    def __init__(
        self,
        store: Store,
        committer: CommitThread,
        row_ranges: list[dict[str, tuple[int, int]]],
        *,
        after: float,
        limits: MergeLimits,
    ) -> None:
        self._merges = merges = _Merges(store, committer, row_ranges, after, limits)
        self._is_idle, self._is_stopped = merges.is_idle, merges.is_stopped
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._requests, weakref.ref(merges)),
            name="cpr_ext-compactor",
            daemon=True,
        )
        # Also a merge under way: it has the store open.
        weakref.finalize(self, _end, self._is_stopped, self._requests).atexit = False
        close_at_exit(self, self._thread)  # first: an interrupt may come between the two
        self._thread.start()

    @property
    def merges_done(self) -> int:
        """How many merged segments became live."""
        return self._merges.num_done

    @property
    def errors(self) -> list[Exception]:
        """Why merges failed; the caller may empty it."""
        return self._merges.errors

    def consider(self) -> None:
        """Merge what is due after a commit, unless a merge is under way."""
        if self._is_idle.is_set():
            self._is_idle.clear()
            self._requests.put(True)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being merged; False if the time ran out first."""
        return self._is_idle.wait(timeout_seconds)

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Abort the current merge and wait for its end; ``consider`` starts again."""
        self._is_stopped.set()
        self._is_idle.wait(timeout_seconds)
        self._is_stopped.clear()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Stop for good; it may be called again, also after an interrupt."""
        self._is_stopped.set()
        self._requests.put(False)
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(timeout_seconds)


class _Merges:
    """What the thread has of a compactor, so that a merge does not keep that alive."""

    def __init__(
        self,
        store: Store,
        committer: CommitThread,
        row_ranges: list[dict[str, tuple[int, int]]],
        after: float,
        limits: MergeLimits,
    ) -> None:
        self.num_done = 0
        self.errors: list[Exception] = []
        self.is_idle = threading.Event()
        self.is_idle.set()
        self.is_stopped = threading.Event()
        self._store = store
        self._committer = committer
        self._row_ranges = row_ranges
        self._after = after
        self._limits = limits

    def run(self) -> None:
        try:
            for shard in range(self._store.num_shards):
                self._compact(shard)
        except SnapshotError as stopped:
            _forget_frames(stopped)
        except Exception as error:
            logger.error("compaction failed: %s", error)
            self.errors.append(_forget_frames(error))
        finally:
            self.is_idle.set()

    def _compact(self, shard: int) -> None:
        manifest = self._store.shards[shard]
        # The points first: segments that are committed meanwhile are newer than all of them.
        points = recovery_points(self._store.dense.segments)
        segments = manifest.segments
        for merge in plan_merges(segments, points):
            if not self._is_due(merge, segments):
                continue
            try:
                pace = Pace(self._limits.bytes_per_second, self.is_stopped.is_set)
                ranges = self._row_ranges[shard]
                merged = write_merged(manifest, shard, ranges, merge, self._limits, pace)
            except SnapshotError:
                raise
            except Exception as error:
                if set(merge.sources) <= set(manifest.segments):
                    raise
                _forget_frames(error)
                continue  # a newer base took their place meanwhile
            # By no name: an error has this frame, and the future the error.
            swapped = partial(commit_merged, manifest, merged)
            self.num_done += self._committer.call(swapped).result()

    def _is_due(self, merge: Merge, segments: tuple[SegmentRecord, ...]) -> bool:
        base_bytes = max((r.file_bytes for r in segments if r.kind == "base"), default=0)
        added_bytes = sum(record.file_bytes for record in merge.read[1:])
        return added_bytes > self._after * base_bytes


def _forget_frames(error: Exception) -> Exception:
    """Return an error that keeps no store open: frames have it, and it has them."""
    traceback.clear_frames(error.__traceback__)
    return error.with_traceback(None)


def _end(is_stopped: threading.Event, requests: queue.SimpleQueue[bool]) -> None:
    is_stopped.set()
    requests.put(False)


def _serve(requests: queue.SimpleQueue[bool], of_compactor: weakref.ref[_Merges]) -> None:
    """Run the compactor's thread, which ends once the compactor is garbage."""
    while requests.get():
        merges = of_compactor()
        if merges is None:
            return
        merges.run()
        del merges


def make_compactor(
    store: Store,
    committer: CommitThread,
    tables: Sequence[Table],
    *,
    after: float | None,
    bytes_per_second: float | None,
) -> Compactor | None:
    """Return a compactor of all shards of ``tables``; None with ``after=None``."""
    if after is None:
        return None
    ranges = [
        {t.name: shard_row_range(t.num_embeddings, shard, store.num_shards) for t in tables}
        for shard in range(store.num_shards)
    ]
    limits = MergeLimits(bytes_per_second=bytes_per_second)
    return Compactor(store, committer, ranges, after=after, limits=limits)
