"""A worker's own rows and dense state, and the way back to its newest states."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.checkpointer.checkpointer import Checkpointer
from cpr_ext.distributed.collective.collectives import flatten, unflatten
from cpr_ext.distributed.parity import protocol
from cpr_ext.distributed.parity.held_parity import KeptPart
from cpr_ext.distributed.parity.missing_rows import Fetch, MissingRows
from cpr_ext.distributed.parity.placement import cut
from cpr_ext.distributed.parity.protocol import DEPTH, Log
from cpr_ext.errors import PeerLostError, UsageError
from cpr_ext.runtime.cuda import device_of
from cpr_ext.state.dense_state import DensePart, own_part, shared_part
from cpr_ext.state.slot_keys import is_key_array, require_same_form
from cpr_ext.state.table import Table


class DeviceCopies:
    """Copies in host memory of the tables whose rows are on a GPU, which parity protects.

    A copy has the rows as of the newest completed step. What leads rows back changes the copies,
    from which the GPU's rows are then restored. Other tables are not copied.

    Args:
        arrays: weight and state of each table, (num_embeddings, ...) each.
    """

    def __init__(self, arrays: Sequence[Sequence[torch.Tensor]]) -> None:
        #: Of each table the copies, or the arrays themselves.
        self.arrays: list[list[torch.Tensor]] = []
        self._copied: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._noted: dict[int, list[torch.Tensor]] = {}
        for number, given in enumerate(arrays):
            own = [array.detach() for array in given]
            found = own
            if device_of(given[0]) is not None:
                found = [torch.empty_like(array, device="cpu").copy_(array) for array in own]
                self._copied[number] = list(zip(own, found, strict=True))
            self.arrays.append(found)

    def note(self, number: int, row_ids: torch.Tensor) -> None:
        """Note that rows (n,) of the table at a position are about to change."""
        if number in self._copied:
            self._noted.setdefault(number, []).append(row_ids)

    def take(self) -> None:
        """Copy the rows that were noted since the last call, for which the host waits."""
        for array, copy, row_ids in self._changed():
            copy[row_ids] = array[row_ids.to(array.device)].to(copy.device)

    def take_all(self) -> None:
        """Copy all rows, those too that something has changed unseen."""
        self._noted.clear()
        for array, copy in self._pairs():
            copy.copy_(array)

    def give_back(self) -> None:
        """Restore the rows that were noted from their copies."""
        for array, copy, row_ids in self._changed():
            array[row_ids.to(array.device)] = copy[row_ids].to(array.device)

    def give_back_all(self) -> None:
        """Restore all rows from their copies."""
        self._noted.clear()
        for array, copy in self._pairs():
            array.copy_(copy)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for pairs in self._copied.values() for pair in pairs]

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        noted, self._noted = self._noted, {}
        found = []
        for number, row_ids in noted.items():
            rows = torch.cat(row_ids).unique()  # type: ignore[no-untyped-call]
            found += [(array, copy, rows) for array, copy in self._copied[number]]
        return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class KeyCopies:
    """Keys and scores as of the newest completed step, which parity protects, table by table.

    A map changes its keys at any time, and reports nothing. The copies change at the end of a step
    only, in the slots that differ then. So they can be kept before they change, as rows are.

    Args:
        tables: those that are not keyed are left out.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = [table for table in tables if table.slots is not None]
        self._copies = [
            {name: array.clone() for name, array in sorted(table.key_arrays().items())}
            for table in self._tables
        ]
        self._versions: list[object] = [None for _ in self._tables]

    @property
    def arrays(self) -> list[list[torch.Tensor]]:
        """The copies of each table, (num_embeddings, ...) each."""
        return [list(copies.values()) for copies in self._copies]

    @property
    def names(self) -> list[str]:
        """What each table's copies are, for messages."""
        return [f"the keys of table '{table.name}'" for table in self._tables]

    def take(self, note: Callable[[int, torch.Tensor], None] = lambda number, slots: None) -> None:
        """Copy what differs.

        Args:
            note: called before the slots (n,) of the table at a position are copied.

        Raises:
            UsageError: a map is wrong, or has other scores than before.
        """
        for number, (table, copies) in enumerate(zip(self._tables, self._copies, strict=True)):
            assert table.slots is not None
            version = table.slots.version()
            if version is not None and version == self._versions[number]:
                continue
            table.slots.refresh()
            arrays = table.key_arrays()
            require_same_form(table.name, arrays, copies)
            slots = _differing(arrays, copies)
            if len(slots):
                note(number, slots)
                for name, copy in copies.items():
                    copy[slots] = arrays[name].detach()[slots]
            self._versions[number] = version

    def give_back(self) -> None:
        """Put keys and scores back to the copies, and have the maps built again."""
        for number, (table, copies) in enumerate(zip(self._tables, self._copies, strict=True)):
            assert table.slots is not None
            for name, array in table.slots.arrays().items():
                array.detach().copy_(copies[name])
            table.slots.rebuild()
            self._versions[number] = table.slots.version()


def _differing(arrays: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (n,) the slots that differ in any bit, ascending."""
    found = [
        torch.nonzero((now != then).reshape(len(now), -1).any(1)).flatten()
        for name, copy in copies.items()
        for now, then in [(_bits(arrays[name]), _bits(copy))]
        if not torch.equal(now, then)
    ]
    if not found:
        return torch.empty(0, dtype=torch.int64)
    return found[0] if len(found) == 1 else torch.cat(found).unique()  # type: ignore[no-untyped-call]


def _bits(array: torch.Tensor) -> torch.Tensor:
    return array.detach().view(_INTEGERS.get(array.element_size(), torch.int64))


# The rows of a shard are hashed in so many blocks: 32 KB to send per delta, whatever its size.
_BLOCKS = 4096
_MOST_THREADS = 4


class RowChecksums:
    """Follows the deltas of a shard: what they say is in the checksums, and nothing else.

    So rows that something else has changed differ from them (:meth:`find_wrong_rows`).

    Args:
        layout: of the shard.
        names: of the layout's tables, for messages.
    """

    def __init__(self, layout: Any, names: Sequence[str]) -> None:
        self._names = names
        threads = native.ThreadPool(num_threads=min(_MOST_THREADS, torch.get_num_threads()))
        self._native = native.ShardChecksums(layout, max_blocks=_BLOCKS, pool=threads)
        self._known: dict[int, torch.Tensor] = {}  # by state

    def begin(self, state: int) -> None:
        """Take the rows as they are: they are of ``state``."""
        self._native.read()
        self._known = {state: self._values()}

    def finish_delta(self, delta: Any, step: int, oldest: int) -> None:
        """Complete a delta, which leads to ``step``; states before ``oldest`` are forgotten."""
        delta.finish(self._native)
        self._known = {s: values for s, values in self._known.items() if s >= oldest}
        self._known[step] = self._values()

    def of_state(self, state: int) -> torch.Tensor:
        """Return the checksums of a state (n,) uint8."""
        return self._known[state].view(torch.uint8)

    def go_back(self, state: int) -> None:
        """Take the checksums of an earlier state, whose rows are back."""
        self._known = {s: values for s, values in self._known.items() if s <= state}
        self._native.restore(self._known[state])

    def restore(self, state: int, checksums: torch.Tensor) -> None:
        """Take what :meth:`of_state` returned on another worker for these rows."""
        self._known = {state: checksums.view(torch.int64)}
        self._native.restore(self._known[state])

    def find_wrong_rows(self, begin: int = 0, end: int | None = None) -> str:
        """Return which rows are not those of the checksums; empty: all are.

        Args:
            begin, end: look only at blocks of rows that end after the word ``begin`` of the shard,
                and not after ``end``; None: the last.
        """
        wrong = self._native.find_wrong_rows(begin, end)
        if not wrong:
            return ""
        table, begin, end = wrong[0]
        more = f", and {len(wrong) - 1} more blocks of rows" if len(wrong) > 1 else ""
        return f"{self._names[table]}, among rows {begin} to {end - 1}{more}"

    def _values(self) -> torch.Tensor:
        values = self._native.values()  # of no rows, it has no stride
        return torch.from_numpy(values) if values.size else torch.empty(0, dtype=torch.int64)


class OwnRows:
    """Records what each step changes; a listener of the Checkpointer's tables.

    Args:
        parts: into how many parts the rows are cut.
        delta_bytes: limit of what ``stride`` steps may change.
        stride: steps from one delta to the next.
        wait: returns once rows may change; called before the first rows of a step do.
        fetch: gets missing rows while this worker is rebuilt, see :class:`MissingRows`; None: rows
            are rebuilt before training.

    Attributes:
        log: of the states to which these rows can return; None: before :meth:`begin`.
        obstacle: why that is not all that changed; empty: it is.
        wants_encoding: rows changed that no delta has. They count as they are, and parity does not
            have them yet.
        rest_seconds: between two times that such changes are accepted.
        values: of the state that was restored last.
        missing: rows that are not there yet.
        tables: those of the Checkpointer.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        parts: int,
        delta_bytes: int,
        wait: Callable[[], None],
        stride: int = 1,
        fetch: Fetch | None = None,
    ) -> None:
        self.log: Log | None = None
        self.obstacle = ""
        self.wants_encoding = False
        self.rest_seconds = 0.0
        self.values: dict[str, Any] = {}
        self._accepts_from = float("-inf")  # by the monotonic clock
        self._is_told = False  # peers have been told that there is an obstacle
        self._is_known = True  # the layout has the arrays that are trained
        self._checkpointer = checkpointer
        self.tables = checkpointer.tables
        self._index = {id(table): number for number, table in enumerate(self.tables)}
        self._wait = wait
        self._stride = stride
        self._arrays = _arrays_of(self.tables)
        self._keys = KeyCopies(self.tables)
        self._on_devices = DeviceCopies([list(arrays.values()) for arrays in self._arrays])
        self.layout = native.ShardLayout([*self._on_devices.arrays, *self._keys.arrays])
        self.bounds = cut(self.layout.records, parts)
        self.missing = MissingRows(self.layout, self.tables, fetch or _refuse)
        if fetch is not None:
            self.missing.watch_lookups()
        names = [f"table '{table.name}'" for table in self.tables]
        self._checksums = RowChecksums(self.layout, [*names, *self._keys.names])
        # The training thread changes what the sender's thread may be reading.
        self._lock = threading.Lock()
        made: list[Any] = [
            native.RowDelta(self.layout, max_bytes=delta_bytes) for _ in range(DEPTH + 2)
        ]
        self._changing, self._torn, *self._spare = made
        self._visited: int | None = None  # the state of the rows, if not that of the log
        self._completed = 0  # the newest complete step; _changing began at log.newest, _torn here
        self._deltas: dict[int, Any] = {}  # by the step that they belong to
        self._copies: dict[int, DensePart] = {}  # of the dense state, by state
        checkpointer.session.events.listeners[:] = [self]

    @property
    def part_words(self) -> list[int]:
        """The words of each part."""
        return [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def begin(self, state: int, values: dict[str, Any] | None = None) -> None:
        """Set rows and dense state to be of ``state``, without a way back.

        Args:
            values: of the caller, who has not seen them yet.
        """
        self._keys.take()
        self._on_devices.take_all()
        self._checksums.begin(state)
        self._begin(state, values)

    def _begin(self, state: int, values: dict[str, Any] | None) -> None:
        self._changing.clear()
        self._torn.clear()
        self._forget_deltas()
        self.obstacle, self.wants_encoding, self._is_told = "", False, False
        self.log = protocol.begin(state, self._stride)
        self._completed = state
        self._copies = {state: self._capture(values)}

    def _forget_deltas(self, before: float = float("inf")) -> None:
        for old in [old for old in self._deltas if old < before]:
            self._deltas[old].clear()
            self._spare.append(self._deltas.pop(old))

    def before_change(self, table: Table, row_ids: torch.Tensor) -> None:
        """Keep the rows that are about to change, once they may."""
        if self.log is None:
            return
        self._wait()
        if not table.updates_only_looked_up_rows():
            row_ids = torch.arange(table.num_embeddings)
        row_ids = row_ids.cpu()
        number = self._index[id(table)]
        if self.missing.find(number, row_ids).numel():
            self.missing.note_bypassed()
            raise PeerLostError(
                f"rows of table '{table.name}' that are not rebuilt yet were read past its "
                "modules; all return to before this step, and all rows are rebuilt before training"
            )
        with self._lock:
            self._changing.note(number, row_ids)
        self._on_devices.note(number, row_ids)
        if self._completed > self.log.newest:
            self._torn.note(number, row_ids)

    def before_write(self, table: Table, row_ids: torch.Tensor) -> None:
        """Keep rows that are written; missing ones are awaited, as for a lookup."""
        self.missing.need(table, row_ids)
        self.before_change(table, row_ids)

    def _before_keys_change(self, number: int, slots: torch.Tensor) -> None:
        with self._lock:
            self._changing.note(len(self.tables) + number, slots)

    def changed_outside(self, table: Table) -> None:
        """Record that rows changed that no delta has."""
        self.obstacle = self.obstacle or f"table '{table.name}' was changed outside its optimizer"

    def finish_step(self, step: int) -> bool:
        """Complete a step of this worker; returns whether it has a delta.

        Raises:
            UsageError: its optimizer has made per-row state of which there is no parity, or a map
                of keys is wrong.
        """
        assert self.log is not None
        self._checkpointer.session.watch.check()
        self._require_known_arrays()
        self._keys.take(self._before_keys_change)
        with self._lock:
            self._on_devices.take()
        if self._completed > self.log.newest:  # no delta leads back to a step in between
            del self._copies[self._completed]
        self._torn.clear()
        self._completed = step
        if is_due := step == self.log.next:
            with self._lock:
                self._finish_delta(step)
        self._copies[step] = self._capture()
        return is_due

    def accept_changes(self, step: int, *, may_accept: bool = True) -> str:
        """Take rows as they are, at the step of a delta, if something else has changed them.

        Then there is no way back to an earlier step, and ``wants_encoding``. Rows that are equal to
        their checksums are no obstacle any more. It is done once per ``rest_seconds``, as it reads
        all rows.

        Args:
            may_accept: no other thread reads rows of earlier states.

        Returns:
            The table and its rows that changed; empty: none, or they are not accepted now.
        """
        if not self.obstacle:
            return ""
        can_accept = may_accept and self._is_known and not self.missing.is_any
        if not can_accept or time.monotonic() < self._accepts_from:
            self._is_told = True
            return ""
        with self._lock:
            self._on_devices.take_all()
        changed = self._checksums.find_wrong_rows()
        if changed:
            self._forget_deltas(before=step)  # peers get that of this step still
            self._checksums.begin(step)
            self.log = protocol.begin(step, self._stride)
            self._copies = {step: self._copies[step]}
            changed = f"{changed}, were changed outside their optimizer"
        self.wants_encoding = bool(changed) or self._is_told
        self.obstacle, self._is_told = "", False
        self._accepts_from = time.monotonic() + self.rest_seconds
        return changed

    def _finish_delta(self, step: int) -> None:
        assert self.log is not None
        self.log = protocol.append(self.log, step)
        self._checksums.finish_delta(self._changing, step, self.log.oldest)
        self._deltas[step] = self._changing
        self._forget_deltas(before=self.log.oldest + 1)
        self._changing = self._spare.pop()
        self._copies = {s: c for s, c in self._copies.items() if s >= self.log.oldest}

    def message(self, step: int, part: int) -> torch.Tensor:
        """Return the delta of a step for the rows of one part, as int64 words."""
        begin, end = self.bounds[part : part + 2]
        return torch.from_numpy(self._deltas[step].pack(begin, end))

    def shared_copy(self, state: int) -> DensePart:
        """Return the part of the dense state of ``state`` that all workers have alike."""
        return shared_part(self._copies[state], self._checkpointer.optimizers, self.tables)

    def own_copy(self, state: int) -> DensePart:
        """Return the part of it that no other worker has."""
        known = self._checkpointer
        return own_part(
            self._copies[state], known.model, known.optimizers, self.tables, known.declared
        )

    def to_keep(self, state: int) -> KeptPart:
        """Return what a peer keeps of ``state`` in addition to parity, for :meth:`restore`."""
        return (*flatten(self.own_copy(state)), self._checksums.of_state(state))

    def find_wrong_rows(self) -> None:
        """Make rows an obstacle that are not those of the log's newest state."""
        if (wrong := self._checksums.find_wrong_rows()) and not self.obstacle:
            self.obstacle = f"rows changed outside their optimizer unseen: {wrong}"

    def find_wrongly_rebuilt(self, begin: int, end: int) -> None:
        """Make rebuilt rows an obstacle that are not the lost ones.

        Args:
            begin, end: words of the shard; of blocks that end after one, and not after the other.
        """
        if (wrong := self._checksums.find_wrong_rows(begin, end)) and not self.obstacle:
            self.obstacle = f"its rebuilt rows differ from their checksums: {wrong}"

    def abandon_step(self) -> bool:
        """Return to the newest step that is complete; it may be later than the newest delta.

        Returns:
            Whether any is known: ``values`` are of it then.
        """
        if self.log is None:
            return False
        torn = self._torn if self._completed > self.log.newest else self._changing

        def restore_rows() -> None:
            torn.undo()
            self._on_devices.give_back()

        self.values = self._rewind(self._copies[self._completed], restore_rows)
        return True

    def go_back(self, state: int) -> None:
        """Return to an earlier state of the log, rows and dense state."""
        self.values = self._rewind(self._copies[state], partial(self._restore_rows, state))
        self._copies = {s: copy for s, copy in self._copies.items() if s <= state}
        self._checksums.go_back(state)
        self._completed = state

    @contextmanager
    def visiting(self, state: int) -> Iterator[None]:
        """Put the rows to an earlier state of the log inside the block; all else stays.

        The step in progress must be abandoned before, and :meth:`begin` called after.
        """
        assert self.log is not None
        self._on_devices.take_all()
        deltas = [self._deltas[step] for step in protocol.undo_order(self.log, state)]
        if self._completed > self.log.newest:
            if not self._changing.is_finished:
                self._changing.finish()
            deltas.insert(0, self._changing)
        for delta in deltas:
            delta.toggle()
        self._checksums.go_back(state)
        self._visited = state
        try:
            yield
        finally:
            self._visited = None
            for delta in reversed(deltas):
                delta.toggle()

    def restore(
        self, state: int, whole: DensePart, kept: KeptPart, there: Sequence[tuple[int, int]]
    ) -> None:
        """Begin at ``state``, of which rows are there and the dense state is given.

        Rows that are not those of ``kept`` are an obstacle; then nothing else is changed.

        Args:
            there: the words of the shard that are there; all others are missing.
        """
        *own, checksums = kept
        self.obstacle = ""
        self._checksums.restore(state, checksums)
        for begin, end in there:
            self.find_wrongly_rebuilt(begin, end)
        if not self.obstacle:
            restore_rows = self._on_devices.give_back_all
            self.values = self._rewind(whole, restore_rows, unflatten(*own))
            self._begin(state, self.values)

    def read(self, state: int, part: int, begin: int, words: torch.Tensor) -> None:
        """Copy the words of a part from ``begin`` on, as many as there are; the rest stays.

        Args:
            state: the newest of the log or the one before; the rows may be changing meanwhile.
        """
        first = self.bounds[part] + begin
        count = max(0, min(words.numel(), self.bounds[part + 1] - first))
        if not count:
            return
        with self._lock:
            delta = None if state == self._visited else self._delta_after(state)
            if delta is None or not delta.num_rows:
                self.layout.read(first, words[:count])
                return
            found = delta.gather_before(torch.tensor([first]), count, first + count)
        words[:count] = torch.from_numpy(found)

    def gather(self, state: int, part: int, places: torch.Tensor, width: int) -> torch.Tensor:
        """Return ``width`` words of a part from each of ``places`` (n,) on; zeros after its end.

        Args:
            state: as of :meth:`read`.
            places: ascending, ``width`` apart or more.
        """
        begin, end = self.bounds[part : part + 2]
        with self._lock:
            found = self._delta_after(state).gather_before(places + begin, width, end)
        return torch.from_numpy(found)

    def write(self, part: int, begin: int, words: torch.Tensor) -> None:
        """Overwrite the words of a part from ``begin`` on, but rows that came by themselves."""
        first = self.bounds[part] + begin
        if self.missing.is_any:
            is_there = self.missing.own_words(first, first + words.numel())
            known = torch.empty_like(words)
            self.layout.read(first, known)
            words = torch.where(is_there, known, words)
        self.layout.write(first, words)

    def _delta_after(self, state: int) -> Any:
        """Return the delta whose undoing leads the rows to ``state``."""
        assert self.log is not None
        steps = protocol.undo_order(self.log, state)
        if not steps:
            return self._changing
        if len(steps) > 1 or self._changing.num_rows:
            raise protocol.ProtocolError(f"rows changed twice after state {state}: {self.log}")
        return self._deltas[steps[0]]

    def _capture(self, values: dict[str, Any] | None = None) -> DensePart:
        return self._checkpointer.session.whole_part(values)

    def _rewind(
        self, part: DensePart, restore_rows: Callable[[], None], own: DensePart | None = None
    ) -> Any:
        values = self._checkpointer.session.rewind(part, restore_rows, own)
        self._keys.give_back()
        return values

    def _restore_rows(self, state: int) -> None:
        assert self.log is not None
        self._on_devices.take_all()
        self._torn.clear()
        self._changing.undo()
        for step in protocol.undo_order(self.log, state):
            self._undo_step(step)
        self._on_devices.give_back_all()

    def _undo_step(self, step: int) -> None:
        assert self.log is not None
        delta = self._deltas.pop(step)
        delta.undo()
        self._spare.append(delta)
        self.log = protocol.undone(self.log, step)

    def _require_known_arrays(self) -> None:
        for table, known in zip(self.tables, self._arrays, strict=True):
            arrays = _protected_arrays(table)
            if new := sorted(arrays.keys() - known.keys()):
                raise UsageError(
                    f"table '{table.name}': its optimizer has made per-row state {new} in a step, "
                    "of which there is no parity. Create it before training, as "
                    "torch.optim.Adagrad does"
                )
            for name, values in known.items():
                if name not in arrays or arrays[name].data_ptr() != values.data_ptr():
                    self.obstacle = f"table '{table.name}': {name} was replaced"
                    self._is_known = False


def _refuse(number: int, row_ids: torch.Tensor) -> None:
    raise AssertionError("no row is missing")


def _arrays_of(tables: list[Table]) -> list[dict[str, torch.Tensor]]:
    for table in tables:
        _make_state(table)
    return [_protected_arrays(table) for table in tables]


def _protected_arrays(table: Table) -> dict[str, torch.Tensor]:
    """Return weight and state by name, in order; of keys there are copies."""
    return {name: a for name, a in sorted(table.arrays().items()) if not is_key_array(name)}


def _make_state(table: Table) -> None:
    """Make now what SparseAdam makes in its first step, and as it does."""
    if isinstance(table.optimizer, torch.optim.SparseAdam):
        state = table.optimizer.state[table.weight]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(
                    table.weight, memory_format=torch.preserve_format
                ).detach()
