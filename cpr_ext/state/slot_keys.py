"""Keys of a table's rows: which id has each slot now, and what the policy of its map keeps of it.

The rows of a keyed table are slots: ids are given one, and lose it again. A key is one more array
of a row, so it is captured in the same copy as its row and restored with it. The map from ids to
slots is built again from the keys that are restored. So rows and map cannot be of different steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from cpr_ext.errors import UsageError

KEY = "key"
#: The key of a slot that no id has.
EMPTY = -1
_SCORE = "key."
# A multiplier whose high bits mix all bits of a key.
_MIX = -7046029254386353131


@dataclass(frozen=True)
class KeyShare:
    """Which ids belong to this process of a job: equal ranges of them, whatever their slots.

    Attributes:
        index, count: this process is one of so many, from 0.
        num_ids: ids are in [0, num_ids); others go by their remainder.
    """

    index: int
    count: int
    num_ids: int

    def owns(self, keys: torch.Tensor) -> torch.Tensor:
        """Return (n,) bool: which of the keys (n,) int64 belong to this process."""
        at = keys // -(-self.num_ids // self.count)
        return torch.where(at < self.count, at, keys % self.count) == self.index


class SlotKeys:
    """The keys of a table's slots, and scores of the policy that evicts ids.

    Args:
        key: (num_embeddings,) int64, which the user changes in place; -1: the slot is empty. No two
            slots have the same key.
        scores: counters or times of each slot by name, (num_embeddings, ...), saved with its row.
        on_restored: called after a recovery has changed the keys; builds the user's map again.
    """

    #: The ids of this process, if their number and its place say so; None: only its slots do.
    share: KeyShare | None = None
    #: Slots at the end of the table that no id gets.
    num_reserved = 0

    def __init__(
        self,
        key: torch.Tensor,
        scores: Mapping[str, torch.Tensor] | None = None,
        *,
        on_restored: Callable[[], None] | None = None,
    ) -> None:
        self.key = key
        self.scores = dict(scores or {})
        self._on_restored = on_restored

    def arrays(self) -> dict[str, torch.Tensor]:
        """Return keys and scores by the names that they have in a store."""
        return {KEY: self.key, **{_SCORE + name: score for name, score in self.scores.items()}}

    def refresh(self) -> None:
        """Bring the arrays up to date before they are captured, where a map has its own form."""

    def version(self) -> object:
        """Return what is equal while nothing can have changed; None: it is not known."""
        return None

    def rebuild(self) -> None:
        """Have the map built again from restored keys."""
        if self._on_restored is not None:
            self._on_restored()

    def require_fit(self, table: str, weight: torch.Tensor) -> None:
        """Raise UsageError unless the arrays have one row for each row of ``weight``."""
        for name, array in self.arrays().items():
            if not isinstance(array, torch.Tensor):
                raise UsageError(
                    f"table {table!r}: {name} is a {type(array).__name__}; needed: a tensor"
                )
            num_rows = array.shape[0] if array.dim() else 0
            if num_rows != weight.shape[0] or not array.is_contiguous():
                raise UsageError(
                    f"table {table!r}: {name} has shape {tuple(array.shape)}; needed: contiguous, "
                    f"with one row for each of the {weight.shape[0]} slots"
                )
            if array.device != weight.device:
                raise UsageError(
                    f"table {table!r}: {name} is on {array.device}, the weight on {weight.device}; "
                    "put both on one device"
                )
        if self.key.dtype != torch.int64 or self.key.dim() != 1:
            raise UsageError(
                f"table {table!r}: keys are {self.key.dtype} of shape {tuple(self.key.shape)}; "
                "needed: int64 of shape (num_embeddings,). Map larger ids to int64 first"
            )


def as_slot_keys(given: object, table: str, weight: torch.Tensor) -> SlotKeys | None:
    """Return what ``Table(keys=...)`` was given as :class:`SlotKeys`; None stays None."""
    if given is None:
        return None
    if not isinstance(given, torch.Tensor | SlotKeys):
        raise UsageError(
            f"table {table!r}: keys is a {type(given).__name__}; needed: an int64 tensor of shape "
            "(num_embeddings,), or SlotKeys"
        )
    slots = SlotKeys(given) if isinstance(given, torch.Tensor) else given
    slots.require_fit(table, weight)
    return slots


def require_same_form(
    table: str, arrays: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]
) -> None:
    """Raise UsageError unless keys and scores have the form of earlier copies of them."""
    now, then = (
        {name: (tuple(array.shape), array.dtype) for name, array in some.items()}
        for some in (arrays, copies)
    )
    if now != then:
        raise UsageError(
            f"table '{table}' has keys and scores {now}, at the start {then}; those of the start "
            "are saved and protected. Give SlotKeys all of them before training"
        )


def is_key_array(name: str) -> bool:
    """Return whether a row's array of this name is its key, or a score of it."""
    return name == KEY or name.startswith(_SCORE)


def require_free_names(table: str, names: Iterable[str]) -> None:
    """Raise UsageError if optimizer state has the name of a key array."""
    if taken := sorted(name for name in names if is_key_array(name)):
        raise UsageError(
            f"table {table!r}: optimizer state {taken} has the name of the keys in a store; give "
            "it another name in the optimizer"
        )


def slots_with_keys_of(key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return (n,) the slots that have a key in common with ``slots``, and some others perhaps.

    Takes a few passes over the keys, where sorting all would take many.

    Args:
        slots: (k,) int64; those of them that are empty have no key.
    """
    wanted = key[slots]
    wanted = wanted[wanted != EMPTY]
    bits = max(10, (16 * max(1, len(wanted))).bit_length())
    marks = torch.zeros(1 << bits, dtype=torch.bool, device=key.device)
    marks[_hashes(wanted, bits)] = True
    found = [
        begin + torch.nonzero(marks[_hashes(part, bits)] & (part != EMPTY)).flatten()
        for begin in range(0, len(key), _BLOCK)
        for part in (key[begin : begin + _BLOCK],)
    ]
    return torch.cat(found) if found else slots[:0]


_BLOCK = 1 << 20


def _hashes(keys: torch.Tensor, bits: int) -> torch.Tensor:
    return ((keys * _MIX) >> (64 - bits)) & ((1 << bits) - 1)


def repeated(key: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return (n,) the slots among ``slots`` whose key another one of them has too."""
    order = torch.argsort(key[slots], stable=True)
    sorted_keys = key[slots][order]
    is_same = torch.zeros(len(slots), dtype=torch.bool, device=key.device)
    same_as_next = (sorted_keys[1:] == sorted_keys[:-1]) & (sorted_keys[1:] != EMPTY)
    is_same[1:] |= same_as_next
    is_same[:-1] |= same_as_next
    return slots[order[is_same]].sort().values
