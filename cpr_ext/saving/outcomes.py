"""What becomes of snapshots once other threads are done with them."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Sequence

from cpr_ext.errors import SnapshotFailedWarning
from cpr_ext.metrics.run_state import RunState
from cpr_ext.runtime.cuda import trim_memory
from cpr_ext.runtime.log_text import encodable, logger_of
from cpr_ext.saving.read_back import ReadBack
from cpr_ext.saving.rebase_policy import ArrayNames, RebasePolicy
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store

logger = logger_of("saving")


class Outcomes:
    """Takes note of what was committed and of what failed; on the training thread.

    Args:
        devices: GPUs that have tables.

    Attributes:
        unreported: the error of a failed snapshot that no exception reported, none being committed
            since.
        last_bytes: of the files of the newest snapshot.
        content: digest of the newest one's dense part, or of what was recovered; empty: not known.
        read_back: reads the first of them back.
    """

    def __init__(
        self,
        store: Store,
        account: RunState,
        rebase: RebasePolicy,
        committer: CommitThread,
        devices: Sequence[int],
    ) -> None:
        self.unreported: Exception | None = None
        self.last_bytes = 0
        self.content = b""
        self.read_back: ReadBack | None = None
        self._store = store
        self._account = account
        self._rebase = rebase
        self._committer = committer
        self._devices = devices

    def note_committed(self, snapshot: Snapshot, arrays: ArrayNames) -> None:
        """Take note of a snapshot that is durable.

        Args:
            arrays: of each table that it holds.
        """
        snapshot.rows.forget_taken()  # users may keep the snapshot
        self.unreported = None
        self.last_bytes = snapshot.file_bytes
        self.content = snapshot.content
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
        if self.read_back is None:
            self.read_back = read_back = ReadBack(self._store)
            self._committer.submit(lambda: self._committer.do_when_idle(read_back))
        self._account.update_schedule()
        trim_memory(self._devices, if_short=True)

    def note_read_back(self) -> None:
        """Take note of what was found in reading the first snapshot back."""
        if self.read_back is None or (damage := self.read_back.damage) is None:
            return
        self.read_back = None  # of the next one, which is of all rows
        self._account.metrics.read_backs_failed += 1
        self._rebase.forget_base()
        text = encodable(
            f"the snapshot in '{self._store.directory}' is damaged: "
            f"{damage}. The next snapshot is of all rows; look for errors of the disk"
        )
        logger.error(text)
        warnings.warn(text, SnapshotFailedWarning, stacklevel=5)

    def note_failed(self, snapshot: Snapshot, error: Exception, *, warn: bool) -> None:
        """Give its rows their priority back, and report it."""
        snapshot.rows.put_back()
        trim_memory(self._devices, if_short=True)
        if self._store.retention.release_when_full and _is_disk_full(error):
            # Waited for: the next snapshot reserves its space as soon as it begins.
            self._committer.call(self._store.release_history).result()
        self._rebase.note_failed(snapshot.kind, error)
        self.unreported = error
        self._account.note_failed(error)
        logger.error("snapshot %d failed: %s", snapshot.number, error)
        if warn:
            text = f"snapshot {snapshot.number} failed; training continues: {encodable(error)}"
            warnings.warn(text, SnapshotFailedWarning, stacklevel=4)

    def flush(self) -> None:
        """Wait until all that was handed over is recorded."""
        self._committer.call(lambda: None).result()

    def close(self) -> None:
        """End the threads; may be called again, also after an interrupt."""
        self._committer.close()
        trim_memory(self._devices)


def _is_disk_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
