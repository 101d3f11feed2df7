"""Tables of which an optimizer moves rows without a gradient: by momentum, or weight decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpr_ext.state.table import Table


class DriftingTables:
    """Remembers the tables that have drifted, also once their optimizer's settings change."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._drifted: set[int] = set()
        # By optimizer: settings of its groups, its tables, their trust, and those that drift.
        self._known: dict[int, tuple[list[int], list[int], list[bool | None], list[int]]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._drifted

    def note_step(self, optimizer: torch.optim.Optimizer, owned: list[int]) -> list[int]:
        """Return the tables of which this step moves rows without a gradient; remember them.

        Args:
            owned: positions of the tables that the optimizer has.
        """
        groups = optimizer.param_groups
        settings = [bool(g.get("momentum")) + 2 * bool(g.get("weight_decay")) for g in groups]
        trust = [self._tables[index].is_trusted for index in owned]
        known = self._known.get(id(optimizer))
        if known is None or known[:3] != (settings, owned, trust):
            moved = [i for i in owned if not self._tables[i].updates_only_looked_up_rows()]
            known = self._known[id(optimizer)] = (settings, owned, trust, moved)
        self._drifted.update(known[3])
        return known[3]

    def take_settled(self) -> list[int]:
        """Return, once, the tables that used to drift and do not any more."""
        settled = [
            i for i in sorted(self._drifted) if self._tables[i].updates_only_looked_up_rows()
        ]
        self._drifted.difference_update(settled)
        return settled

    def clear(self) -> None:
        """Forget all drift: the tables equal their saved state."""
        self._drifted.clear()
