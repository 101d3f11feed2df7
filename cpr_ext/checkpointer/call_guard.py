"""Refuses calls that a ``Checkpointer`` cannot serve now, naming the reason and the remedy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from cpr_ext.errors import UsageError
from cpr_ext.runtime.cuda import is_capturing, use_training_streams
from cpr_ext.runtime.forks import Creator
from cpr_ext.storage.store import Store
from cpr_ext.tracking.table_watch import TableWatch


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
