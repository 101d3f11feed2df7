"""What becomes of snapshots once other threads are done with them."""

from __future__ import annotations

import errno
import time
import warnings
from collections.abc import Iterator, Sequence

from cpr_ext.errors import CprError, DamageError, SnapshotFailedWarning
from cpr_ext.recovery.verify import checked_pieces, refusal
from cpr_ext.runtime.cuda import trim_memory
from cpr_ext.runtime.log_text import encodable, logger_of
from cpr_ext.saving.rebase_policy import ArrayNames, RebasePolicy
from cpr_ext.saving.run_state import RunState
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from cpr_ext.storage.store_reader import StoreReader

logger = logger_of("saving")

#: The most of the time of one core that reading back takes.
SHARE = 0.2


class ReadBack:
    """Reads the first committed snapshot as ``cpr verify`` does: what is lost is found early.

    Block by block, while no snapshot is to be committed, on the thread that commits them.

    Attributes:
        damage: what a recovery would refuse; None: nothing is found so far.
        has_ended: it does nothing more.
    """

    def __init__(self, store: Store) -> None:
        self.damage: str | None = None
        self.has_ended = False
        self._store = store
        self._reader = store.view()
        self._bytes_read = 0
        self._pieces = _pieces(self._reader)

    def advance(self) -> float | None:
        """Read the next block; return for how long to leave the core to others, None: ended."""
        if self.has_ended:
            return None
        started = time.perf_counter()
        try:
            self._bytes_read += next(self._pieces)
            return (time.perf_counter() - started) * (1 / SHARE - 1)
        except StopIteration:
            logger.info("the first snapshot was read back: %.1f MB", self._bytes_read / 1e6)
        except DamageError as error:
            self._note_damage(error)
        except Exception as error:  # no memory, no thread, an error of the system
            logger.info("the first snapshot was not read back: %s", error)
        self.has_ended = True
        return None

    def _note_damage(self, error: DamageError) -> None:
        try:  # files of another store, or of none, say nothing of this one
            self._store.require_in_place()
            is_gone = self._reader.is_gone()
        except (CprError, OSError):
            is_gone = True
        if is_gone:
            logger.info("the first snapshot was not read back: newer ones took its place")
        else:
            self.damage = str(error)

    def finish(self) -> None:
        """Read all of it; on the thread that commits."""
        while self.advance() is not None:
            pass


def _pieces(reader: StoreReader) -> Iterator[int]:
    newest = reader.newest()
    yield from checked_pieces(reader, newest)
    records = reader.manifest.at(newest.snapshot)
    for record in records:
        yield from checked_pieces(reader, record)
    if (reason := refusal(reader, records)) is not None:
        raise DamageError(reason)


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
            snapshot.live_bytes,
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
