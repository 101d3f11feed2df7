"""Rewinds a ``Checkpointer`` by some steps, for rows that are rebuilt from peers' memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpr_ext.checkpointer.call_guard import CallGuard
from cpr_ext.checkpointer.parts import Parts
from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.table import ChangeSource, Table
from cpr_ext.tracking.change_listener import ChangeListener


class Rewinding:
    """Copies what is not a table row, and goes back to such a copy; rows are the caller's.

    Attributes:
        devices: GPUs that have tables.
    """

    def __init__(self, parts: Parts, guard: CallGuard, tables: Sequence[Table]) -> None:
        self.devices = parts.devices
        self._account = parts.account
        self._rebase = parts.rebase
        self._dense = parts.dense
        self._keys = parts.keys
        self._recorder = parts.recorder
        self._saver = parts.saver
        self._store = parts.store
        self._watch = parts.watch
        self._guard = guard
        self._handles: list[Any] = []
        # Each once: tables of one fused kernel have the same one.
        sources: dict[int, Any] = {id(table.lookups): table.lookups for table in tables}
        self._sources: list[ChangeSource] = [
            source for source in sources.values() if isinstance(source, ChangeSource)
        ]

    def keep_unsaved_buffers(self) -> None:
        """Have snapshots hold buffers that ``state_dict()`` leaves out, from now on."""
        self._dense.keeps_unsaved_buffers = True

    def whole_part(self, values: Mapping[str, Any] | None = None) -> DensePart:
        """Return a copy of everything that is not a table row, for :meth:`rewind`.

        Args:
            values: in place of the caller's, who has not seen them yet; None: the caller's.
        """
        self._guard.require_open()
        return self._dense.capture_whole(values)

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
        self._guard.require_open()
        position = self._dense.position_of(own or part)
        with self._guard.in_call("rewind()"):
            if self._guard.may_train and own is None and position.step == self._account.step:
                self._saver.pause()
            else:
                self._forget_later_snapshots(position.step, is_replaced=own is not None)
            restore_rows()
            self._dense.restore_whole(part, own)
            self._recorder.forget()
            self._watch.begin_step()
            self._watch.changes.versions.read()
            self._account.resume_at(position.step, position.num_samples)
        return position.values

    def _forget_later_snapshots(self, step: int, *, is_replaced: bool) -> None:
        self._store.require_in_place()
        is_kept = not is_replaced and self._saver.keep_up_to(step)
        # Then rows count as unsaved that changed since the newest snapshot, and undone ones.
        if not is_kept or any(r.last_step > step for r in self._store.manifest.dense):
            self._saver.quiesce()
            kept = [r.snapshot for r in self._store.manifest.dense if r.last_step <= step]
            self._store.roll_back(max(kept, default=0))
            self._saver.claims.forget()
            self._rebase.forget_base()
            self._keys.forget()
        self._guard.may_train = True

    def listen_to_changes(self, listener: ChangeListener | None) -> None:
        """Report every change of the tables to ``listener``; None: to nobody."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.changes.listener = listener
        if listener is not None:
            for source in self._sources:
                self._handles += source.watch_changes(listener.before_change)

    def hold_snapshots(self, may_begin: Callable[[bool], bool]) -> None:
        """Ask before each snapshot begins.

        Args:
            may_begin: returns whether it may. Called with True for one that does not wait for a
                later step: then returns when it may.
        """
        self._saver.may_begin = may_begin

    def check_changes(self) -> None:
        """Look now for changes of tables outside their optimizers."""
        self._watch.check()
