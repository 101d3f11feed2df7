"""What a ``Checkpointer`` is made of; how it saves, ends, and rewinds."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpr_ext.checkpointer.dense_capture import DenseCapture
from cpr_ext.checkpointer.parts import (
    Staging,
    Tracking,
    Trained,
    saving_options,
)
from cpr_ext.errors import SnapshotError, UsageError
from cpr_ext.recovery.recoverer import Recoverer
from cpr_ext.runtime.cuda import is_capturing, use_training_streams
from cpr_ext.runtime.forks import Creator
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.saving.background_capture import BackgroundCapture
from cpr_ext.saving.claims import Claims
from cpr_ext.saving.outcomes import Outcomes
from cpr_ext.saving.rebase_policy import RebasePolicy
from cpr_ext.saving.run_state import CostMeter, RunState
from cpr_ext.saving.saver import Saver, SavingParts
from cpr_ext.saving.selection import Selector, SnapshotKind
from cpr_ext.saving.snapshot_handle import SnapshotHandle
from cpr_ext.saving.snapshot_rows import SnapshotContext, TableSources
from cpr_ext.state.dense_schema import read_position
from cpr_ext.state.dense_state import DensePart
from cpr_ext.storage.commit_thread import CommitThread
from cpr_ext.storage.store import Store
from cpr_ext.tracking.table_watch import TableWatch
from cpr_ext.tracking.unwatched import warn_of_schedulers, warn_of_sparse_gradients

logger = logger_of("saving")

_MID_STEP = (
    "{call} in the middle of step {step}: an optimizer has stepped since step(), so the state to "
    "capture is past that step. Call it after step()"
)


class _Call:
    """A call in progress. It ends with its block, also if Ctrl-C comes before its last line."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.begin(self)

    def __exit__(self, *_: object) -> None:
        self._guard.end()


def _no_call() -> None:
    return None


class CallGuard:
    """Knows in which state a ``Checkpointer`` is: of which process, open, busy, recovered.

    Args:
        watch: sees changes of the tables that no snapshot can hold.
        devices: GPUs that have tables.

    Attributes:
        is_closed: its resources are released.
        may_train: nothing is in the store, or it was recovered.
    """

    def __init__(self, store: Store, watch: TableWatch, devices: Sequence[int]) -> None:
        self.is_closed = False
        self._call: Callable[[], _Call | None] = _no_call
        self.may_train = store.is_empty
        self._store = store
        self._watch = watch
        self._devices = devices
        self._creator = Creator()

    @property
    def is_busy(self) -> bool:
        """Whether a call is being made: the handler of a signal may make another one."""
        return self._call() is not None

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that has the threads and locks."""
        return not self._creator.is_this_process

    def require_open(self) -> None:
        """Raise UsageError in a forked child, and after ``close()``."""
        self._creator.require("Checkpointer")
        if self.is_closed:
            raise UsageError("the Checkpointer is closed; make another one for its directory")

    def require_recovered(self) -> None:
        """Raise UsageError if training would run over snapshots that were not recovered."""
        self.require_open()
        if not self.may_train:
            last = self._store.manifest.dense[-1]
            raise UsageError(
                f"'{self._store.directory}' holds a snapshot of step {last.last_step}; call "
                "recover() before the first step(), or choose an empty directory to start again"
            )

    def require_savable(self) -> None:
        """Raise UsageError if a snapshot of the tables would be wrong."""
        if (problem := self._watch.changes.problem) is not None:
            raise UsageError(problem)

    def require_idle(self, name: str) -> None:
        """Raise UsageError while another call is being made, or a CUDA graph captured."""
        if self.is_busy:
            raise UsageError(f"{name} from a signal's handler while another call is being made")
        if self._devices and is_capturing():
            raise UsageError(
                f"{name} while a CUDA graph is captured: a replay would not repeat it. Call it "
                "outside of the graph, after each replay"
            )

    def in_call(self, name: str) -> _Call:
        """Allow one call at a time, in a block: a signal handler may interrupt one."""
        self.require_idle(name)
        return _Call(self)

    def begin(self, call: _Call) -> None:
        """Note that a call is being made for as long as it exists."""
        self._call = weakref.ref(call)
        use_training_streams(self._devices)

    def end(self) -> None:
        """Note that the call has ended."""
        self._call = _no_call


class Session:
    """What a ``Checkpointer`` is made of, and how it saves, ends and rewinds.

    It opens the store, and attaches the hooks. All calls come from the training thread.

    Attributes:
        devices: GPUs that have tables.
        trackers: by table name.
        chooses_all: a partial snapshot saves every dirty row.

    Raises:
        UsageError: the tables do not fit the settings.
        StoreError: the directory is not a store, holds another model, or is in use.
        StorageError: the directory cannot be made, read or written.
    """

    def __init__(self, trained: Trained, directory: str | os.PathLike[str]) -> None:
        settings = trained.settings
        model, optimizers, tables = trained.model, trained.optimizers, trained.tables
        self.model, self.optimizers, self.tables = model, optimizers, tables
        self.chooses_all = settings.priority.fraction >= 1
        staging = Staging(trained)
        self.devices, self._stagers = staging.devices, staging.stagers
        tracking = Tracking(trained, staging.threads)
        self.trackers, self.events, self.keys = tracking.trackers, tracking.events, tracking.keys
        self.recorder, self.watch = tracking.recorder, tracking.watch
        self.inventory = tracking.inventory
        prioritized, num_shards = tracking.prioritized, settings.num_shards
        meter = CostMeter(tables, prioritized, settings.priority.fraction, num_shards)
        self.account = account = RunState(meter, settings.schedule, num_shards)
        origin = None
        if settings.store.remote is not None:
            origin = settings.store.remote.open(Path(directory).absolute())
        retention = settings.store.retention
        self.store = store = Store(directory, tables=tables, retention=retention, origin=origin)
        self.recoverer = Recoverer(
            *(model, optimizers, tables, store, num_shards),
            *(self.trackers, self.recorder, self.keys, staging.threads),
            # Files that were made just now are in the page cache.
            direct_io=settings.staging.direct_io and not (origin is not None and origin.read_from),
            declared=trained.declared,
        )
        self.dense = DenseCapture(
            *(model, optimizers, tables, self.trackers, self.watch, account, trained.declared),
            self.inventory,
            refuses_nan=settings.store.refuses_nan,
        )
        self.rebase = RebasePolicy(store, tables, settings.store.rebase_after)
        committer, hashes = CommitThread(), tracking.hashes
        selector = Selector(
            *(tables, self.trackers, settings.priority, prioritized, staging.threads),
            lambda: self.watch.changes.any_changed,
            self.keys,
        )
        overlap = None
        if BackgroundCapture.is_wanted(tables):
            overlap = BackgroundCapture(tables, self.watch, self.events)
        claims = Claims(
            *(tables, store, account, committer, self.watch, hashes, self.events),
            has_windows=overlap is not None,
        )
        amount = CaptureAmount(
            *(tables, settings.priority, prioritized),
            lambda: self.recorder.num_lookups + self.watch.rows.num_updates,
            self.rebase.array_names,
            staging.pipeline.slot_bytes * settings.staging.num_slots,
            overlaps=overlap is not None,
        )
        sources = TableSources(hashes)
        self.events.changed_outside.append(sources.forget)
        parts = SavingParts(
            SnapshotContext(store, selector, staging.pipeline, hashes, sources),
            *(account, self.rebase, committer, self.watch, self.inventory, self.keys, claims),
            Outcomes(store, account, self.rebase, committer, self.devices),
            *(amount, overlap, self.dense.capture, self.events),
        )
        self.saver = Saver(parts, saving_options(trained))
        self.guard = CallGuard(store, self.watch, self.devices)
        self._is_finished = False
        self._requested: SnapshotHandle | None = None
        self._is_first_step = True
        self._has_trained = False  # since the last recovery
        if store.is_empty:  # the first step's snapshot would wait; a run that resumes begins sooner
            tracking.make_memory()
        tracking.attach()  # last: what fails above leaves the model as it was
        _open.add(self)

    def step(self, num_samples: int, started: float) -> SnapshotHandle | None:
        """End a training step that began to block at ``started``; the snapshot that began, if any.

        See :meth:`cpr_ext.Checkpointer.step`.
        """
        if self._is_first_step:
            self._is_first_step = False
            warn_of_sparse_gradients(self.model, self.tables)
            declared = self.dense.declared
            if not declared.values:
                warn_of_schedulers(self.optimizers, declared.objects.values())
        self._has_trained = True
        account, saver = self.account, self.saver
        saver.pause()
        self.recorder.flush()
        self.recorder.begin_step()
        self.watch.begin_step()
        account.resume_at(account.step + 1, account.num_samples + num_samples)
        saver.settle()
        begun = self.take_requested()
        if begun is None and (snapshot := saver.begin_if_due()) is not None:
            begun = SnapshotHandle(snapshot.kind, snapshot)
        saver.resume()
        account.note_step(
            num_samples,
            time.perf_counter() - started + self.watch.take_held_seconds(),
            is_saving=saver.in_flight is not None,
            row_updates=self.recorder.num_lookups + self.watch.rows.num_updates,
        )
        return begun

    def save(self, kind: SnapshotKind) -> SnapshotHandle:
        """Take a snapshot now, or let the next step() take it in the middle of a step."""
        if self._is_mid_step:
            if self._requested is None:
                self._requested = SnapshotHandle(kind)
            elif kind == "base":
                self._requested.upgrade()
            return self._requested
        with self.guard.in_call("save()"):
            return self._take(SnapshotHandle(kind))

    def _take(self, handle: SnapshotHandle) -> SnapshotHandle:
        self.saver.pause()
        self.recorder.flush()
        handle.resolve(self.saver.take(handle.kind))
        return handle

    def take_requested(self) -> SnapshotHandle | None:
        """Take the snapshot that was requested in the middle of a step, if one was."""
        if self._requested is not None and not self.saver.may_begin(False):
            return None  # rows are being rebuilt, and some others have changed in this step
        request, self._requested = self._requested, None
        return None if request is None else self._take(request)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for the snapshot in flight; see :meth:`cpr_ext.Checkpointer.wait`."""
        if self._is_mid_step and (self._requested is not None or self._needs_step):
            raise UsageError(_MID_STEP.format(call="wait()", step=self.account.step + 1))
        with self.guard.in_call("wait()"):
            if (request := self._requested) is not None:  # a recovery has undone its step
                self._requested = None
                self._take(request)
            return self._wait(timeout_seconds)

    def _wait(self, timeout_seconds: float | None) -> bool:
        started = time.monotonic()
        if timeout_seconds is None:
            self.saver.advance()
        else:
            self.saver.advance_for(timeout_seconds)
        snapshot = self.saver.in_flight
        if snapshot is None:
            self._grant()
            return True
        if timeout_seconds is not None:
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - started))
        if not snapshot.wait_until_done(timeout_seconds):
            return False
        self.saver.settle(warn=False)
        if snapshot.error is not None:
            self.saver.outcomes.unreported = None
            raise SnapshotError(f"snapshot {snapshot.number} failed") from snapshot.error
        self._grant()
        return True

    def _grant(self) -> None:
        """Make the check of a snapshot to its end, and have the store record what came of it."""
        if not self.is_past_step:
            self.recorder.flush()
            self.saver.claims.finish()
            self.saver.outcomes.flush()

    def check(self) -> dict[str, int]:
        """Compare all rows that count as unchanged; see :meth:`cpr_ext.Checkpointer.check`."""
        if self._is_mid_step:
            raise UsageError(_MID_STEP.format(call="check()", step=self.account.step + 1))
        with self.guard.in_call("check()"):
            self.saver.pause()
            self.recorder.flush()
            self.saver.finish()
            found = self.saver.claims.check()
            return {changed.table.name: changed.row_id for changed in found}

    def note_recovered(self, *, whole: bool) -> None:
        """Take note of a recovery; ``whole``: the model is as a store has it."""
        if whole:
            self.saver.outcomes.content = self.dense.content()
        self._has_trained = self._has_trained and not whole

    def finish(self, *, save: bool) -> None:
        """Finish the snapshot in flight, and save what was trained since.

        In the middle of a step, abort what needs its end.
        """
        if self._is_finished:
            return  # by a close() that was interrupted later
        if self.is_past_step:
            self._abort_mid_step()
        else:
            self.take_requested()
        self.saver.finish()
        self._grant()
        self._save_last(save=save)
        self._is_finished = True

    def note_interrupted(self) -> None:
        """Say what may be lost by a Ctrl-C, or a loader's end, that comes while training ends."""
        _open.discard(self)
        text = "close() did not end: training ended at step %d: steps after %d may not be saved"
        logger.warning(text, self.account.step, self._newest_step)

    @property
    def _newest_step(self) -> int:
        newest = self.store.manifest.newest
        return 0 if newest is None else newest.last_step

    def _save_last(self, *, save: bool) -> None:
        """Save all rows if the newest snapshot lacks anything, or report what is not saved."""
        unsaved = self._unsaved()
        if unsaved is None:
            return
        if not save:
            logger.info("close(save=False) saves nothing: %s", unsaved)
        elif self.watch.changes.problem is not None:
            logger.warning("close() saves nothing: %s; %s", unsaved, self.watch.changes.problem)
        elif self.is_past_step:
            text = "close() saves nothing in the middle of a step: %s; call it after step()"
            logger.warning(text, unsaved)
        else:
            last = self._take(SnapshotHandle("partial" if self._partial_is_complete else "base"))
            self.saver.finish()
            self._grant()
            hashes = self.saver.claims.hashes
            if last.kind == "partial" and not last.is_complete and hashes.unsaved_table():
                self._take(SnapshotHandle("base"))  # with what was written unseen
                self.saver.finish()

    def _unsaved(self) -> str | None:
        """Say what of the live model the newest snapshot does not hold; None: it holds all."""
        step, newest = self.account.step, self.store.manifest.newest
        if not self.guard.may_train:
            return None  # it has not recovered what its store holds
        if newest is None:
            return f"no snapshot holds any of the {step} steps" if self._has_trained else None
        if self._has_trained and newest.last_step != step:
            return f"the newest snapshot is of step {newest.last_step}, training is at step {step}"
        if self._has_trained and not newest.is_complete:
            return f"the snapshot of step {step} lacks changed rows"
        if self._has_trained and not self.rebase.has_base:
            return "a base snapshot is due: the store may not hold all rows of the model"
        return self._written_since(step)

    def _written_since(self, step: int) -> str | None:
        """Say what was written since the newest snapshot, or a recovery, by content."""
        if self.is_past_step:
            return f"an optimizer has stepped since step {step}"
        self.recorder.flush()
        self.keys.look()
        self.watch.check(replaced=True)
        self.watch.changes.settle()
        if (table := self.saver.claims.hashes.unsaved_table()) is not None:
            return f"rows of table '{table}' were written after step {step}"
        if self.dense.content() != self.saver.outcomes.content:
            return f"the model or its declared state was changed after step {step}"
        return None

    @property
    def _partial_is_complete(self) -> bool:
        """Return whether a snapshot of all dirty rows holds all that changed."""
        return self.chooses_all and self.watch.changes.are_counted()

    def _abort_mid_step(self) -> None:
        """Abort everything that needs a next step(): there will be none."""
        step = self.account.step + 1
        reason = self.watch.changes.problem or (
            f"close() in the middle of step {step}: step() was not called after the optimizer's"
        )
        if self._requested is not None:
            error = SnapshotError(f"the snapshot that was asked for was not taken: {reason}")
            self._requested.refuse(error)
            self.saver.outcomes.unreported = error
        if self._needs_step:
            self.saver.abort(reason)

    def abort(self, *, is_reported: bool) -> None:
        """Release everything after an error, which may have left a step half done: save nothing.

        Args:
            is_reported: log what is not saved.
        """
        try:
            self.saver.quiesce()
            if is_reported and (unsaved := self._unsaved()) is not None:
                logger.warning("an exception ended training, so nothing more is saved: %s", unsaved)
        except Exception as error:  # also a warning made an error: the user's own comes first
            logger.error("while an exception ended training: %s", error)
            self.note_interrupted()
        finally:
            self.release()

    def release(self) -> None:
        """End all threads, then take hooks and locks away."""
        self.recorder.detach()
        self.watch.detach()
        try:
            self.saver.close()  # interrupted: threads may still write, so the locks are kept
            if self.store.origin is not None:
                self.store.origin.end(waits=self._is_finished)
        except Exception:
            self.guard.is_closed = True
            self.store.close()
            raise
        self.guard.is_closed = True
        self.store.close()
        _open.discard(self)

    def raise_unreported(self) -> None:
        """Raise SnapshotError for a failure that no exception reported, if there is one."""
        if (error := self.saver.outcomes.unreported) is not None:
            failures = len(self.account.metrics.failures)
            raise SnapshotError(
                f"{failures} snapshot(s) failed, the last because: {error}"
            ) from error

    @property
    def is_past_step(self) -> bool:
        """Return whether the model may be past the known step."""
        return self.watch.has_stepped or self.watch.is_inside_step or self.recorder.is_mid_step

    @property
    def _is_mid_step(self) -> bool:
        return self.guard.is_busy or self.is_past_step

    @property
    def _needs_step(self) -> bool:
        """Return whether the current snapshot waits for rows or the dense part as of a step."""
        snapshot = self.saver.in_flight
        if snapshot is None or snapshot.state != "capturing":
            return False
        return not snapshot.rows.are_of_fixed_step

    # --- for rows that are rebuilt from peers' memory ---

    def whole_part(self, values: Mapping[str, Any] | None = None) -> DensePart:
        """Return a copy of everything that is not a table row, for :meth:`rewind`.

        Args:
            values: in place of the caller's, who has not seen them yet; None: the caller's.
        """
        self.guard.require_open()
        return self.dense.capture_whole(values)

    def rewind(
        self, part: DensePart, restore_rows: Callable[[], None], own: DensePart | None = None
    ) -> Any:
        """Resume from the step of ``part``, to which ``restore_rows`` puts the rows back.

        A step in progress is aborted. Snapshots of later steps are dropped. If there were any, or
        ``part`` is another worker's, the next snapshot is a base snapshot.

        Args:
            part: a :meth:`whole_part`.
            restore_rows: called when no other thread reads the tables.
            own: the part that only this worker has, if ``part`` is another worker's; see
                :func:`cpr_ext.state.dense_state.own_part`.

        Returns:
            The values of that step.

        Raises:
            StoreError: it is of another model; nothing was changed.
        """
        self.guard.require_open()
        position = read_position((own or part).tree())
        with self.guard.in_call("rewind()"):
            if self.guard.may_train and own is None and position.step == self.account.step:
                self.saver.pause()
            else:
                self._forget_later_snapshots(position.step, is_replaced=own is not None)
            restore_rows()
            self.dense.restore_whole(part, own)
            self.recorder.forget()
            self.watch.begin_step()
            self.watch.changes.versions.read()
            self.account.resume_at(position.step, position.num_samples)
        return position.values

    def _forget_later_snapshots(self, step: int, *, is_replaced: bool) -> None:
        self.store.require_in_place()
        is_kept = not is_replaced and self.saver.keep_up_to(step)
        # Then rows count as unsaved that changed since the newest snapshot, and undone ones.
        if not is_kept or any(r.last_step > step for r in self.store.manifest.dense):
            self.saver.quiesce()
            kept = [r.snapshot for r in self.store.manifest.dense if r.last_step <= step]
            self.store.roll_back(max(kept, default=0))
            self.saver.claims.forget()
            self.rebase.forget_base()
            self.keys.forget()
        self.guard.may_train = True


_open: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _say_what_was_left_open() -> None:
    """Say what may be lost where close() was not called: Ctrl-C may come just before it is."""
    for session in list(_open):
        is_own = not session.guard.is_closed and not session.guard.is_forked
        if is_own and session._has_trained and session._newest_step < session.account.step:
            session.note_interrupted()
