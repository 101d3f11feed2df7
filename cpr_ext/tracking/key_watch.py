"""Which slots of keyed tables have another key than the newest snapshot has.

The keys are compared with a copy of the saved ones at each snapshot, so a change is not missed,
however it was made. Takes 8 bytes per slot, and as much again for each score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext._native import native
from cpr_ext.errors import UsageError
from cpr_ext.state.slot_keys import (
    EMPTY,
    KEY,
    SlotKeys,
    repeated,
    require_same_form,
    slots_with_keys_of,
)
from cpr_ext.state.table import Table

_UNKNOWN = -2  # the saved key of a slot that must be saved whatever it holds
_NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _Look:
    """What differs from the newest committed snapshot, at the step of the next one."""

    changed: torch.Tensor  # slots (k,) with another key
    key: torch.Tensor  # theirs (k,)
    scores: dict[str, tuple[torch.Tensor, torch.Tensor]]  # slots with another one, and it
    num_held: int  # slots that have a key
    num_evicted: int | None  # keys that the snapshot before had, and no slot has; None: unknown


class _Saved:
    """The saved keys and scores of one table."""

    def __init__(self, table: Table, slots: SlotKeys) -> None:
        self.table = table
        self.slots = slots
        self._saved = {name: array.clone() for name, array in slots.arrays().items()}
        self._saved[KEY].fill_(_UNKNOWN)
        self._is_newest = True  # nothing is saved that has other keys
        self.look: _Look | None = None

    def look_now(self) -> torch.Tensor:
        """Compare; return the slots that differ in anything."""
        self.look = None
        self.slots.refresh()
        arrays, saved = self.slots.arrays(), self._saved
        require_same_form(self.table.name, arrays, saved)
        key = arrays[KEY]
        changed = torch.nonzero(key != saved[KEY]).flatten()
        self._refuse_wrong(key, changed)
        scores = {}
        for name in arrays.keys() - {KEY}:
            differs = (arrays[name] != saved[name]).reshape(len(key), -1).any(1)
            rows = torch.nonzero(differs).flatten()
            scores[name] = (rows, arrays[name][rows])
        before, now = saved[KEY][changed], key[changed]
        is_gone = (before >= 0) & ~torch.isin(before, now)
        num_held = int((key != EMPTY).sum())
        num_evicted = int(is_gone.sum()) if self._is_newest else None
        self.look = _Look(changed, now, scores, num_held, num_evicted)
        differing = torch.cat([changed, *(rows for rows, _ in scores.values())])
        return differing.unique()  # type: ignore[no-untyped-call, no-any-return]

    def _refuse_wrong(self, key: torch.Tensor, changed: torch.Tensor) -> None:
        name = self.table.name
        wrong = changed[key[changed] < EMPTY]
        if len(wrong):
            slot = int(wrong[0])
            raise UsageError(
                f"table {name!r}: slot {slot} has key {int(key[slot])}; keys are 0 or more, and "
                f"{EMPTY} is an empty slot"
            )
        same = repeated(key, slots_with_keys_of(key, changed))
        if len(same):
            first = int(key[same[0]])
            both = same[key[same] == first].tolist()
            raise UsageError(
                f"table {name!r}: slots {both[:8]} have the same key {first}; a key has one slot, "
                f"so set the others to {EMPTY}"
            )

    def note_committed(self) -> None:
        if self.look is None:
            return
        self._saved[KEY][self.look.changed] = self.look.key
        for name, (rows, values) in self.look.scores.items():
            self._saved[name][rows] = values
        self._is_newest, self.look = True, None

    def forget(self) -> None:
        self._saved[KEY].fill_(_UNKNOWN)
        self._is_newest, self.look = False, None

    def note_restored(self, begin: int, end: int, emptied: torch.Tensor) -> None:
        self._is_newest, self.look = True, None
        for name, array in self.slots.arrays().items():
            self._saved[name][begin:end] = array[begin:end]
        self._saved[KEY][emptied] = _UNKNOWN


class KeyWatch:
    """Finds the slots that the next snapshot must save, whatever its priority.

    All calls come from the training thread.

    Args:
        trackers: by table name.
        count: marks rows (n,) of a table as changed in its tracker.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        trackers: Mapping[str, native.RowTracker],
        count: Callable[[Table, torch.Tensor], None],
    ) -> None:
        self._trackers = trackers
        self._count = count
        self._saved = {
            table.name: _Saved(table, table.slots) for table in tables if table.slots is not None
        }
        self._error: UsageError | None = None

    def look(self) -> None:
        """Compare all keys with the saved ones; slots that differ count as changed.

        What is wrong with keys fails the snapshot that is about to begin, not this call.
        """
        self._error = None
        for name, saved in self._saved.items():
            try:
                rows = saved.look_now()
            except UsageError as error:
                self._error = error
                return
            dirty = torch.as_tensor(self._trackers[name].dirty_rows(0, saved.table.num_embeddings))
            clean = rows[~torch.isin(rows, dirty.to(rows.device))]
            if len(clean):
                self._count(saved.table, clean)

    def must_save(self, table: Table) -> npt.NDArray[np.int64]:
        """Return (n,) int64, ascending: slots with another key than saved.

        Raises:
            UsageError: :meth:`look` found two slots with one key, or a number that is no key.
        """
        if self._error is not None:
            raise self._error
        saved = self._saved.get(table.name)
        if saved is None or saved.look is None:
            return _NO_ROWS
        return saved.look.changed.cpu().numpy()

    def describe(self) -> dict[str, dict[str, int | None]]:
        """Return what a snapshot notes of keyed tables, by name.

        ``held``: slots that have a key; ``evicted``: keys of the snapshot before that are gone;
        None: it is not known.
        """
        return {
            name: {"held": saved.look.num_held, "evicted": saved.look.num_evicted}
            for name, saved in self._saved.items()
            if saved.look is not None
        }

    def note_committed(self) -> None:
        """Note that the snapshot of the last :meth:`look` is committed."""
        for saved in self._saved.values():
            saved.note_committed()

    def forget(self) -> None:
        """Note that the newest snapshot is another than the last committed one: save all slots."""
        for saved in self._saved.values():
            saved.forget()

    def note_restored(self, table: Table, begin: int, end: int, emptied: torch.Tensor) -> None:
        """Note that slots [begin, end) are as a store has them, except those that were emptied."""
        self._saved[table.name].note_restored(begin, end, emptied)
