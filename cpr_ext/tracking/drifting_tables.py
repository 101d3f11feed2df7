"""Tables of which an optimizer moves rows without a gradient: by momentum, or weight decay."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cpr_ext.state.table import Table


class _Settings:
    """An optimizer's settings, and the positions of the tables that it moves with them."""

    def __init__(self, tables: Sequence[Table], settings: list[int], owned: list[int]) -> None:
        self.moved = [i for i in owned if not tables[i].updates_only_looked_up_rows()]
        self._settings = settings
        self._owned = owned
        self._trust = [(t, t.is_trusted) for i in owned if not (t := tables[i]).is_known()]

    def holds(self, settings: list[int], owned: list[int]) -> bool:
        """Return whether they are still these, and the tables have the same trust."""
        if settings != self._settings or (owned is not self._owned and owned != self._owned):
            return False
        return not self._trust or all(t.is_trusted is trust for t, trust in self._trust)


class DriftingTables:
    """Remembers the tables that have drifted, also once their optimizer's settings change."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._drifted: set[int] = set()
        self._known: dict[int, _Settings] = {}  # by optimizer

    def __contains__(self, index: int) -> bool:
        return index in self._drifted

    def note_step(self, optimizer: torch.optim.Optimizer, owned: list[int]) -> list[int]:
        """Return the tables of which this step moves rows without a gradient; remember them.

        Args:
            owned: positions of the tables that the optimizer has.
        """
        groups = optimizer.param_groups
        settings = [bool(g.get("momentum")) + 2 * bool(g.get("weight_decay")) for g in groups]
        known = self._known.get(id(optimizer))
        if known is None or not known.holds(settings, owned):
            known = self._known[id(optimizer)] = _Settings(self._tables, settings, owned)
        if known.moved:
            self._drifted.update(known.moved)
        return known.moved

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
