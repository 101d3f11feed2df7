"""The calls of a ``Checkpointer`` that save: ``step()``, ``save()``, ``wait()``, ``close()``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from cpr_ext.checkpointer.call_guard import CallGuard
from cpr_ext.checkpointer.options import CheckpointerOptions
from cpr_ext.checkpointer.parts import Parts
from cpr_ext.errors import SnapshotError, UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.saving.selection import SnapshotKind
from cpr_ext.saving.snapshot_handle import SnapshotHandle
from cpr_ext.state.table import Table
from cpr_ext.tracking.schedule_order import ScheduleOrder
from cpr_ext.tracking.unwatched import warn_of_schedulers, warn_of_sparse_gradients

logger = logger_of("saving")

_MID_STEP = (
    "{call} in the middle of step {step}: an optimizer has stepped since step(), so the state to "
    "capture is past that step. Call it after step()"
)


class SaveCalls:
    """Counts steps and takes snapshots; all calls come from the training thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tables: Sequence[Table],
        parts: Parts,
        guard: CallGuard,
        settings: CheckpointerOptions,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._tables = tables
        self._dense = parts.dense
        self._account = parts.account
        self._recorder = parts.recorder
        self._saver = parts.saver
        self._store = parts.store
        self._watch = parts.watch
        self._keys = parts.keys
        self._is_finished = False
        self._guard = guard
        self._requested: SnapshotHandle | None = None
        self._is_first_step = True
        self._has_trained = False  # since the last recovery
        self._chooses_all = settings.chooses_all
        self._schedule_order = ScheduleOrder(parts.dense.declared.objects.values())
        if self._schedule_order.has_schedulers:
            self._watch.first_stepped = self._schedule_order.note_optimizer

    def step(self, num_samples: int, started: float) -> SnapshotHandle | None:
        """End a training step that began to block at ``started``; the snapshot that began, if any.

        See :meth:`cpr_ext.Checkpointer.step`.
        """
        if self._is_first_step:
            self._is_first_step = False
            warn_of_sparse_gradients(self._model, self._tables)
            declared = self._dense.declared
            if not declared.values:
                warn_of_schedulers(self._optimizers, declared.objects.values())
        self._schedule_order.note_step(self._account.step + 1)
        self._has_trained = True
        account, saver = self._account, self._saver
        saver.pause()
        self._recorder.flush()
        self._recorder.begin_step()
        self._watch.begin_step()
        account.resume_at(account.step + 1, account.num_samples + num_samples)
        saver.settle()
        begun = self.take_requested()
        if begun is None and (snapshot := saver.begin_if_due()) is not None:
            begun = SnapshotHandle(snapshot.kind, snapshot)
        saver.resume()
        account.note_step(
            num_samples,
            time.perf_counter() - started + self._watch.held.take(),
            is_saving=saver.in_flight is not None,
            row_updates=self._recorder.num_lookups + self._watch.rows.num_updates,
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
        with self._guard.in_call("save()"):
            return self._take(SnapshotHandle(kind))

    def _take(self, handle: SnapshotHandle) -> SnapshotHandle:
        self._saver.pause()
        self._recorder.flush()
        handle.resolve(self._saver.take(handle.kind))
        self._schedule_order.note_captured()
        return handle

    def take_requested(self) -> SnapshotHandle | None:
        """Take the snapshot that was requested in the middle of a step, if one was."""
        if self._requested is not None and not self._saver.may_begin(False):
            return None  # rows are being rebuilt, and some others have changed in this step
        request, self._requested = self._requested, None
        return None if request is None else self._take(request)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait for the snapshot in flight; see :meth:`cpr_ext.Checkpointer.wait`."""
        if self._is_mid_step and (self._requested is not None or self._needs_step):
            raise UsageError(_MID_STEP.format(call="wait()", step=self._account.step + 1))
        with self._guard.in_call("wait()"):
            if (request := self._requested) is not None:  # a recovery has undone its step
                self._requested = None
                self._take(request)
            return self._wait(timeout_seconds)

    def _wait(self, timeout_seconds: float | None) -> bool:
        started = time.monotonic()
        if timeout_seconds is None:
            self._saver.advance()
        else:
            self._saver.advance_for(timeout_seconds)
        snapshot = self._saver.in_flight
        if snapshot is None:
            self._grant()
            return True
        if timeout_seconds is not None:
            timeout_seconds = max(0.0, timeout_seconds - (time.monotonic() - started))
        if not snapshot.wait_until_done(timeout_seconds):
            return False
        self._saver.settle(warn=False)
        if snapshot.error is not None:
            self._saver.outcomes.unreported = None
            raise SnapshotError(f"snapshot {snapshot.number} failed") from snapshot.error
        self._grant()
        return True

    def _grant(self) -> None:
        """Make the check of a snapshot to its end, and have the store record what came of it."""
        if not self._is_past_step:
            self._recorder.flush()
            self._saver.claims.finish()
            self._saver.outcomes.flush()

    def record_changes(self) -> None:
        """Count rows of changed tables; see :meth:`cpr_ext.Checkpointer.record_changes`."""
        if self._is_mid_step:
            raise UsageError(_MID_STEP.format(call="record_changes()", step=self._account.step + 1))
        with self._guard.in_call("record_changes()"):
            self._saver.quiesce()
            self._recorder.flush()
            self._watch.accept_changes()

    def check(self) -> dict[str, int]:
        """Compare all rows that count as unchanged; see :meth:`cpr_ext.Checkpointer.check`."""
        if self._is_mid_step:
            raise UsageError(_MID_STEP.format(call="check()", step=self._account.step + 1))
        with self._guard.in_call("check()"):
            self._saver.pause()
            self._recorder.flush()
            self._saver.finish()
            found = self._saver.claims.check()
            return {changed.table.name: changed.row_id for changed in found}

    def note_recovered(self, *, whole: bool) -> None:
        """Take note of a recovery; ``whole``: the model is as a store has it."""
        if whole:
            self._schedule_order.restart(is_resumed=self._account.step > 0)
            self._saver.outcomes.content = self._dense.content()
        self._has_trained = self._has_trained and not whole

    def finish(self, *, save: bool) -> None:
        """Finish the snapshot in flight, and save what was trained since.

        In the middle of a step, abort what needs its end.
        """
        if self._is_finished:
            return  # by a close() that was interrupted later
        if self._is_past_step:
            self._abort_mid_step()
        else:
            self.take_requested()
        self._saver.finish()
        self._grant()
        self._save_last(save=save)
        self._is_finished = True

    def _save_last(self, *, save: bool) -> None:
        """Save all rows if the newest snapshot lacks anything, or report what is not saved."""
        unsaved = self._unsaved()
        if unsaved is None:
            return
        if not save:
            logger.info("close(save=False) saves nothing: %s", unsaved)
        elif self._watch.changes.problem is not None:
            logger.warning("close() saves nothing: %s; %s", unsaved, self._watch.changes.problem)
        elif self._is_past_step:
            text = "close() saves nothing in the middle of a step: %s; call it after step()"
            logger.warning(text, unsaved)
        else:
            last = self._take(SnapshotHandle("partial" if self._partial_is_complete else "base"))
            self._saver.finish()
            self._grant()
            hashes = self._saver.claims.hashes
            if last.kind == "partial" and not last.is_complete and hashes.unsaved_table():
                self._take(SnapshotHandle("base"))  # with what was written unseen
                self._saver.finish()

    def _unsaved(self) -> str | None:
        """Say what of the live model the newest snapshot does not hold; None: it holds all."""
        step, newest = self._account.step, self._store.manifest.newest
        if not self._guard.may_train:
            return None  # it has not recovered what its store holds
        if newest is None:
            return f"no snapshot holds any of the {step} steps" if self._has_trained else None
        if self._has_trained and newest.last_step != step:
            return f"the newest snapshot is of step {newest.last_step}, training is at step {step}"
        if self._has_trained and not newest.is_complete:
            return f"the snapshot of step {step} lacks changed rows"
        return self._written_since(step)

    def _written_since(self, step: int) -> str | None:
        """Say what was written since the newest snapshot, or a recovery, by content."""
        if self._is_past_step:
            return f"an optimizer has stepped since step {step}"
        self._recorder.flush()
        self._keys.look()
        self._watch.check(replaced=True)
        self._watch.changes.settle()
        if (table := self._saver.claims.hashes.unsaved_table()) is not None:
            return f"rows of table '{table}' were written after step {step}"
        if self._dense.content() != self._saver.outcomes.content:
            return f"the model or its declared state was changed after step {step}"
        return None

    @property
    def _partial_is_complete(self) -> bool:
        """Return whether a snapshot of all dirty rows holds all that changed."""
        return self._chooses_all and all(
            table.updates_only_looked_up_rows() and self._watch.changes.counts_are_known(table)
            for table in self._tables
        )

    def _abort_mid_step(self) -> None:
        """Abort everything that needs a next step(): there will be none."""
        step = self._account.step + 1
        reason = self._watch.changes.problem or (
            f"close() in the middle of step {step}: step() was not called after the optimizer's"
        )
        if self._requested is not None:
            error = SnapshotError(f"the snapshot that was asked for was not taken: {reason}")
            self._requested.refuse(error)
            self._saver.outcomes.unreported = error
        if self._needs_step:
            self._saver.abort(reason)

    def abort(self, *, is_reported: bool) -> None:
        """Release everything after an error, which may have left a step half done: save nothing.

        Args:
            is_reported: log what is not saved.
        """
        try:
            self._saver.quiesce()
            if is_reported and (unsaved := self._unsaved()) is not None:
                logger.warning("an exception ended training, so nothing more is saved: %s", unsaved)
        except Exception as error:  # also a warning made an error: the user's own comes first
            logger.error("while an exception ended training: %s", error)
        finally:
            self.release()

    def release(self) -> None:
        """End all threads, then take hooks and locks away."""
        self._recorder.detach()
        self._watch.detach()
        try:
            self._saver.close()  # interrupted: threads may still write, so the locks are kept
            if self._store.origin is not None:
                self._store.origin.end(waits=self._is_finished)
        except Exception:
            self._guard.is_closed = True
            self._store.close()
            raise
        self._guard.is_closed = True
        self._store.close()

    def raise_unreported(self) -> None:
        """Raise SnapshotError for a failure that no exception reported, if there is one."""
        if (error := self._saver.outcomes.unreported) is not None:
            failures = len(self._account.metrics.failures)
            raise SnapshotError(
                f"{failures} snapshot(s) failed, the last because: {error}"
            ) from error

    @property
    def _is_past_step(self) -> bool:
        """Return whether the model may be past the known step."""
        return self._watch.has_stepped or self._watch.is_inside_step or self._recorder.is_mid_step

    @property
    def _is_mid_step(self) -> bool:
        return self._guard.is_busy or self._is_past_step

    @property
    def _needs_step(self) -> bool:
        """Return whether the current snapshot waits for rows or the dense part as of a step."""
        snapshot = self._saver.in_flight
        if snapshot is None or snapshot.state != "capturing":
            return False
        return not snapshot.rows.are_of_fixed_step
