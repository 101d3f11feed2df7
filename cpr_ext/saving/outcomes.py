"""What becomes of snapshots and merges once other threads are done with them."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence

from cpr_ext.errors import SnapshotFailedWarning
from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.cuda import trim_memory
from cpr_ext.runtime.log_text import encodable, logger_of
from cpr_ext.saving.rebase_policy import ArrayNames, RebasePolicy
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.compactor import Compactor
from cpr_ext.storage.retention import Retention
from cpr_ext.storage.store import Store

logger = logger_of("saving")


class Outcomes:
    """Takes note of what was committed and of what failed; on the training thread.

    Args:
        compactor: merges segments after commits; None: nobody does.
        devices: GPUs that have tables.

    Attributes:
        unreported: the error of a failed snapshot that no exception reported, none being committed
            since.
        last_bytes: of the files of the newest snapshot.
    """

    def __init__(
        self,
        store: Store,
        account: RunState,
        rebase: RebasePolicy,
        committer: CommitThread,
        compactor: Compactor | None,
        devices: Sequence[int],
    ) -> None:
        self.unreported: Exception | None = None
        self.last_bytes = 0
        self._store = store
        self._account = account
        self._rebase = rebase
        self._committer = committer
        self._compactor = compactor
        self._devices = devices

    def note_committed(self, snapshot: Snapshot, arrays: ArrayNames) -> None:
        """Take note of a snapshot that is durable.

        Args:
            arrays: of each table that it holds.
        """
        snapshot.rows.forget_taken()  # users may keep the snapshot
        self.unreported = None
        self.last_bytes = snapshot.file_bytes
        logger.info(
            "snapshot %d is durable: %s, of step %d, %.1f MB%s",
            snapshot.number,
            snapshot.kind,
            snapshot.last_step,
            snapshot.file_bytes / 1e6,
            ", a full-recovery point" if snapshot.is_complete else "",
        )
        self._rebase.note_committed(snapshot.kind, snapshot.file_bytes, arrays)
        self._account.note_committed(
            snapshot.last_step,
            snapshot.num_samples,
            snapshot.file_bytes,
            is_base=snapshot.kind == "base",
        )
        if self._compactor is not None:
            self._compactor.consider()
        self._account.publish()
        trim_memory(self._devices, if_short=True)

    def note_failed(self, snapshot: Snapshot, error: Exception, *, warn: bool) -> None:
        """Give its rows their priority back, and report it."""
        snapshot.rows.put_back()
        trim_memory(self._devices, if_short=True)
        if self._store.retention.release_when_full and _is_disk_full(error):
            # Waited for: the next snapshot reserves its space as soon as it begins.
            history = Retention(full_recovery_points=0)
            self._committer.call(lambda: self._store.retain(history)).result()
        self._rebase.note_failed(snapshot.kind, error)
        self.unreported = error
        self._account.note_failed(error)
        logger.error("snapshot %d failed: %s", snapshot.number, error)
        if warn:
            text = f"snapshot {snapshot.number} failed; training continues: {encodable(error)}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def settle_compaction(self) -> None:
        """Take note of merges."""
        if (compactor := self._compactor) is None:
            return
        metrics = self._account.metrics
        if compactor.merges_done != metrics.compactions:
            metrics.compactions = compactor.merges_done
            self._rebase.measure_store()
        while compactor.errors:
            error = compactor.errors.pop(0)
            metrics.failed_compactions += 1
            text = f"compaction failed; training continues and no snapshot is affected: {error}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def stop_compaction(self) -> None:
        """Stop merging; what was merged is noted."""
        if self._compactor is not None:
            self._compactor.stop()
            self.settle_compaction()

    def close(self) -> None:
        """End the threads; may be called again, also after an interrupt."""
        if self._compactor is not None:
            self._compactor.close()
        self._committer.close()
        trim_memory(self._devices)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
