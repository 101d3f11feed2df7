"""Rows of keyed tables for consumers: by key, with the keys that are gone.

A slot of a keyed table belongs to one id now and to another later. So a consumer keeps the key of
each slot, 8 bytes. What has left a slot, and has no other one, is gone. It needs no list of
evictions, which a new base or a missed update could cut short.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdKeyDictionary

from cpr_ext.errors import DamageError, UsageError
from cpr_ext.state.slot_keys import EMPTY, KEY, repeated
from cpr_ext.wings.publishing.changed_rows import ChangedRows, PositionError, StorePosition


@dataclass(frozen=True)
class KeyBatch:
    """Rows of a keyed table that changed; or keys that are gone.

    Attributes:
        table: its name in the store.
        keys: (n,) int64.
        arrays: ``weight`` (n, embedding_dim), and optimizer states and scores if they were asked
            for; empty if the keys are gone.
        step: none of the rows was captured after it.
        is_gone: the keys have no row any more.
    """

    table: str
    keys: torch.Tensor
    arrays: dict[str, torch.Tensor]
    step: int
    is_gone: bool = False


@dataclass
class _Progress:
    """What this process did with the keys that a consumer holds.

    Attributes:
        at: the state that they are of; None: it is not known.
        begun: the one of an iteration that was broken off.
        yielded: keys that such iterations yielded.
    """

    at: StorePosition | None = None
    begun: StorePosition | None = None
    yielded: list[torch.Tensor] = field(default_factory=list)


_progress: Mapping[torch.Tensor, _Progress] = WeakIdKeyDictionary()


def by_key(changes: ChangedRows, held: Mapping[str, torch.Tensor]) -> Iterator[KeyBatch]:
    """Yield the changes of keyed tables by key: all rows, then the keys that are gone.

    Args:
        held: of each keyed table, the key of each slot (num_embeddings,) int64 that the consumer
            had at ``changes.since``; -1 everywhere at first. It is changed once all is yielded. So
            an iteration that was broken off can be begun again: applied twice is the same as once.

    Raises:
        UsageError: ``held`` has no int64 tensor of a keyed table's slots.
        PositionError: it is of another state than the changes begin at: one was missed, or came
            late. Or an iteration was broken off, and the store has gone back since.
        DamageError: two slots have the same key.
    """
    known = {
        name: _progress_of(name, held, table.num_embeddings, changes)
        for name, table in changes.tables.items()
        if table.keys
    }
    now = {name: held[name].clone() for name in known}
    for batch in changes:
        if (keys := batch.arrays.get(KEY)) is None:
            continue
        now[batch.table][batch.row_ids] = keys
        is_held = keys != EMPTY
        arrays = {name: v[is_held] for name, v in batch.arrays.items() if name != KEY}
        known[batch.table].begun = changes.until
        known[batch.table].yielded.append(keys[is_held])
        yield KeyBatch(batch.table, keys[is_held], arrays, batch.step)
    for name, column in now.items():
        yielded = torch.cat([column[:0], *known[name].yielded])
        gone = torch.cat([gone_keys(name, held[name], column), yielded]).unique()  # type: ignore[no-untyped-call]
        if len(gone := gone[~torch.isin(gone, column)]):
            yield KeyBatch(name, gone, {}, changes.until.step, is_gone=True)
    for name, column in now.items():
        held[name].copy_(column)
        _progress[held[name]] = _Progress(changes.until)  # type: ignore[index]


def _progress_of(
    name: str, held: Mapping[str, torch.Tensor], num_slots: int, changes: ChangedRows
) -> _Progress:
    column = held.get(name)
    form = (getattr(column, "dtype", None), tuple(getattr(column, "shape", ())))
    if column is None or form != (torch.int64, (num_slots,)):
        raise UsageError(
            f"held has no tensor of {num_slots} keys for table '{name}'; begin with "
            f"torch.full(({num_slots},), -1)"
        )
    known: _Progress = _progress.setdefault(column, _Progress())  # type: ignore[attr-defined]
    if changes.since is None:
        return known
    if known.at not in (None, changes.since, changes.until):
        assert known.at is not None
        raise PositionError(
            f"held['{name}'] is of snapshot {known.at.snapshot}, and the changes are those since "
            f"snapshot {changes.since.snapshot}: one was missed, or comes late. Ask for those "
            "since the state of held, or for all rows with since=None"
        )
    if known.begun is not None and not changes.replace(known.begun):
        raise PositionError(
            f"the changes of table '{name}' up to snapshot {known.begun.snapshot} were applied in "
            "part, and the store has gone back since: copy all rows with since=None"
        )
    return known


def gone_keys(table: str, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return (n,) int64, the keys that no slot has any more; raises DamageError for repeated ones.

    Args:
        before, now: the key of each slot.
    """
    same = repeated(now, torch.arange(len(now), device=now.device))
    if len(same):
        raise DamageError(f"table '{table}': slots {same[:8].tolist()} have the same keys")
    changed = before != now
    left = before[changed]
    left = left[left != EMPTY]
    return left[~torch.isin(left, now[changed])]


class KeyedRows:
    """A table of a serving process whose rows are found by key.

    Args:
        num_embeddings, embedding_dim, dtype: as published, see ``read_publication(...).tables``.

    Attributes:
        weight: (num_embeddings, embedding_dim), by slot.
        key: (num_embeddings,) int64, the key of each slot; -1: it is empty.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.weight = torch.zeros(num_embeddings, embedding_dim, dtype=dtype)
        self.key = torch.full((num_embeddings,), EMPTY)
        self._sorted = (self.key[:0], self.key[:0])

    def __len__(self) -> int:
        """Return how many keys have a row."""
        return len(self._sorted[0])

    def slots_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the slot of each key, in the shape of ``keys``; -1: it has no row."""
        known, slots = self._sorted  # replaced as a whole, so another thread may look up
        if not len(known):
            return torch.full_like(keys, EMPTY, dtype=torch.int64)
        at = torch.searchsorted(known, keys.to(torch.int64)).clamp_(max=len(known) - 1)
        return torch.where(known[at] == keys, slots[at], EMPTY)

    def rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the row of each key, zero for one without: ``(*keys.shape, embedding_dim)``."""
        slots = self.slots_of(keys)
        return self.weight[slots.clamp(min=0)] * (slots >= 0).unsqueeze(-1)

    def set_keys(self, key: torch.Tensor) -> None:
        """Replace the key of each slot."""
        self.key.copy_(key)
        slots = torch.nonzero(self.key != EMPTY).flatten()
        order = torch.argsort(self.key[slots])
        self._sorted = (self.key[slots][order], slots[order])

    def hide(self, slots: torch.Tensor) -> None:
        """Let no key find these slots, whose rows are about to be replaced."""
        key = self.key.clone()
        key[slots] = EMPTY
        self.set_keys(key)
