"""Capture that overlaps training.

Between one optimizer step and the next, forward and backward only read the tables. In that window,
from the end of ``ckpt.step()`` to the optimizer's step, a background thread captures rows. It
returns before an optimizer, or the backward pass of a fused kernel, changes anything. Of a snapshot
of one step the training thread captures what is left then.

All of this assumes that only these change tables. If the watch detects another change, the snapshot
is aborted.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from cpr_ext._native import native
from cpr_ext.errors import SnapshotError
from cpr_ext.runtime.cuda import device_of
from cpr_ext.runtime.threads import close_at_exit
from cpr_ext.saving.snapshot import Snapshot
from cpr_ext.state.table import Table
from cpr_ext.tracking.table_events import TableEvents
from cpr_ext.tracking.table_watch import TableWatch

# Smaller tables are captured faster than a thread is woken for them.
OVERLAP_BYTES = 16 << 20
_POLL_SECONDS = 0.0005  # for which the capture thread sleeps when no staging slot is free
_CHANGED = (
    "table '{name}' was changed outside its optimizer's step() while it was being saved; make such "
    "changes after wait(), or inside of writing_rows()"
)


class CaptureThread:
    """Runs one piece of work at a time, between :meth:`resume` and :meth:`pause`.

    The thread is there from construction on: later the system may have none left.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: Callable[[native.StopFlag], None] | None = None
        # True: look for work, False: end. A finalizer may put one in, which takes no lock.
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stop = native.StopFlag()
        self._thread = threading.Thread(target=self._run, name="cpr_ext-capture", daemon=True)
        close_at_exit(self, self._thread)  # first: an interrupt may come between the two
        self._thread.start()

    def resume(self, work: Callable[[native.StopFlag], None]) -> None:
        """Start ``work(stop)``; it returns soon after ``stop`` is set. After a pause() only."""
        self._stop.clear()
        self._work = work
        self._wakes.put(True)

    def pause(self) -> None:
        """Ask the work to stop; returns once it has."""
        if self._work is None:
            return
        self._stop.set()
        self._wakes.put(True)  # an interrupt may have come before resume() did
        with self._changed:
            self._changed.wait_for(lambda: self._work is None)

    def end(self) -> None:
        """Stop the work, and have the thread end soon."""
        self._stop.set()
        self._wakes.put(False)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Stop the work and end the thread; may be called again, also after an interrupt."""
        self.end()
        if self._thread.ident is not None:  # else it was never started
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while self._wakes.get():
            if (work := self._work) is None:
                continue
            try:
                work(self._stop)
            finally:
                del work  # while it waits it keeps nothing alive
                with self._changed:
                    self._work = None
                    self._changed.notify_all()


def capture_until(snapshot: Snapshot, step: int, stop: native.StopFlag) -> None:
    """Capture rows until ``stop`` is set; some are, however soon that is."""
    while snapshot.has_rows_left:
        progressed = snapshot.capture_rows(step, max_bytes=0, wait_for_slot=False, stop=stop)
        if stop.is_set():
            return
        if not progressed:
            time.sleep(_POLL_SECONDS)


class BackgroundCapture:
    """Captures snapshots while training reads the tables, and stops before it changes them.

    All calls come from the training thread.

    Args:
        watch: sees what changes the tables, and when.
        events: report before tables change and before trackers are used, as snapshots use both.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        watch: TableWatch,
        events: TableEvents,
    ) -> None:
        self._tables = tables
        self._watch = watch
        self._thread = CaptureThread()
        weakref.finalize(self, self._thread.end).atexit = False
        self._snapshot: Snapshot | None = None
        self._is_open = False
        #: A snapshot found a table changed by something else than its optimizer.
        self.was_broken = False
        self._events = events
        events.before_use.append(self.pause)
        events.changed_outside.append(self._give_up)

    @staticmethod
    def obstacle(tables: Sequence[Table]) -> str | None:
        """Return why tables cannot be captured while training runs; None if they can."""
        for table in tables:
            if table.slots is not None:
                return f"table '{table.name}' has keys, which change while the forward pass runs"
            if device_of(table.weight) is not None:
                return f"table '{table.name}' is on a GPU, which captures during training"
            if table.lookups is not None:
                continue  # a fused kernel, which reports before it changes rows
            if not isinstance(table.optimizer, torch.optim.Optimizer):
                return f"no torch optimizer given to the Checkpointer updates table '{table.name}'"
            if table.weight.untyped_storage().nbytes() != table.weight.nbytes:
                return (
                    f"the memory of table '{table.name}' is part of a larger piece, whose owner "
                    "(FSDP) may take away at any time"
                )
            if any(getattr(module, "max_norm", None) is not None for module in table.modules):
                return f"the forward pass changes table '{table.name}', which has a max_norm"
        return None

    @staticmethod
    def is_wanted(tables: Sequence[Table]) -> bool:
        """Return whether to capture while training runs."""
        is_worth_it = sum(table.weight.nbytes for table in tables) >= OVERLAP_BYTES
        return is_worth_it and BackgroundCapture.obstacle(tables) is None

    def resume(self, snapshot: Snapshot, step: int) -> None:
        """Capture a snapshot in the background, while training only reads the tables."""
        self._watch.check()  # between two windows rows may change as they like
        if snapshot.state != "capturing":
            return
        self._snapshot = snapshot
        self._is_open = True
        self._thread.resume(partial(capture_until, snapshot, step))

    def compare(self, run: Callable[[native.StopFlag], None]) -> None:
        """Compare rows in the background, while training only reads the tables."""
        self._thread.resume(run)

    def pause(self) -> None:
        """Wait until nothing is being captured, nor must be before tables change.

        The snapshot is aborted if it may be torn.
        """
        self._thread.pause()
        snapshot = self._snapshot
        if snapshot is not None:
            if self._is_open:
                self._watch.check()
                if snapshot.rows.are_of_fixed_step:
                    snapshot.capture_rows(snapshot.first_step, max_bytes=0, wait_for_slot=True)
            if not snapshot.has_rows_left:
                self._snapshot = None
        self._is_open = False

    def _give_up(self, table: Table) -> None:
        snapshot = self._snapshot
        if snapshot is None or not self._is_open:
            return  # nothing was being captured
        self._snapshot = None
        self.was_broken = True
        snapshot.give_up(SnapshotError(_CHANGED.format(name=table.name)))

    def forget(self) -> None:
        """Stop, and have nothing more to do with the snapshot in flight."""
        self._thread.pause()
        self._is_open = False
        self._snapshot = None

    def close(self) -> None:
        """End the thread and take the hooks away."""
        self._thread.close()
        self.detach()

    def detach(self) -> None:
        """Take the hooks away; in a forked child that is all there is to do."""
        self._snapshot = None
        self._events.before_use.leave(self.pause)
        self._events.changed_outside.leave(self._give_up)
