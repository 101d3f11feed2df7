"""A full-recovery point is worth something only in common, so stores keep the newest such one.

Members of a round say which points they have by notes at the rendezvous, from a thread: training
needs no answer. Without one a store keeps more, not less.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.storage import store
from cpr_ext.storage.manifest import Manifest

logger = logger_of("jobs")

_MOST_SAID = 16  # of the newest ones; who is further behind has none of them
# With ``when_busy="wait"`` a worker that has begun a point has committed the one but last. So has
# each of its peers, of which the fastest has committed two more.
_AT_ODDS = 3


class CommonPoints:
    """What a worker knows of them in one round.

    Args:
        said: the points of each worker's store as the round begins.
        notes: of the round.
    """

    def __init__(
        self, checkpointer: Checkpointer, rank: int, said: Sequence[Sequence[int]], notes: Store
    ) -> None:
        self._store, self._metrics = checkpointer.store, checkpointer.metrics
        self._rank, self._keys = rank, [f"points/{other}" for other in range(len(said))]
        self._notes = notes
        self._news: Sequence[Sequence[int]] | None = said
        self._told: Manifest | None = None  # what the others were told of
        self._thread: threading.Thread | None = None
        self._common: int | None = None
        self._late: list[int] = []

    def look(self, *, is_full: bool) -> None:
        """Before each step: note what others said, and say what is new; if recovery is full."""
        if not is_full:
            self._store.keep_from_step = self._metrics.common_step = None
            return
        news, self._news = self._news, None
        if news is not None:
            self._note(news)
        manifest = self._store.manifest
        if manifest is not self._told and (self._thread is None or not self._thread.is_alive()):
            self._told = manifest
            points = points_in(self._store)[-_MOST_SAID:]
            self._thread = threading.Thread(target=self._exchange, args=(points,), daemon=True)
            self._thread.start()

    def _exchange(self, points: Sequence[int]) -> None:
        with suppress(RuntimeError):  # no answer, or the round is over
            self._notes.set(self._keys[self._rank], json.dumps(points))
            if self._notes.check(self._keys):
                self._news = [json.loads(text) for text in self._notes.multi_get(self._keys)]

    def _note(self, said: Sequence[Sequence[int]]) -> None:
        own = points_in(self._store)
        self._common = max(set(own).intersection(*said), default=self._common)
        self._metrics.common_step = self._common
        first = own[-_AT_ODDS:][:1] if self._common is None else (self._common,)
        self._store.keep_from_step = first[0] if first else None
        newest = [point for point in said[self._rank] if point in own][-_AT_ODDS:]
        is_known = [len(newest) < _AT_ODDS or bool({*newest} & {*points}) for points in said]
        late, before = [rank for rank, known in enumerate(is_known) if not known], self._late
        self._late = late
        if late and late != before and self._rank == is_known.index(True):
            logger.warning(
                "workers %s have made none of the newest %d full-recovery points known, of steps "
                "%s: see in their logs whether they save. Until they do, the stores keep all since "
                "step %d, to which a loss takes all back",
                *(late, _AT_ODDS, ", ".join(map(str, newest)), *first),
            )
        most, size = self._store.retention.max_bytes, self._store.manifest.file_bytes
        if late and not before and most is not None and size > most:
            logger.warning(
                "the store of worker %d has %d bytes, more than max_bytes=%d: it keeps the point "
                "of step %d, in case workers %s lose their state",
                *(self._rank, size, most, *first, late),
            )


def points_in(of: store.Store) -> tuple[int, ...]:
    """Return the steps of a store's full-recovery points."""
    return tuple(r.last_step for r in of.manifest.dense if r.is_complete)
