"""Notices a table whose module holds another parameter now: a dynamic table that has grown."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from cpr_ext.state.table import Table


class TablePlaces:
    """Where a model keeps the weights of its tables."""

    def __init__(self, model: nn.Module, tables: Sequence[Table]) -> None:
        by_weight = {id(table.weight): table for table in tables}
        self._places = [
            (module._parameters, name, by_weight[id(parameter)])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in by_weight
        ]

    def problem(self) -> str | None:
        """Say which table was replaced, and the remedy; None: none was."""
        for parameters, name, table in self._places:
            now = parameters.get(name)
            if now is not table.weight:
                shape = "none" if now is None else f"one of shape {tuple(now.shape)}"
                return (
                    f"table '{table.name}' had a parameter of shape {tuple(table.weight.shape)}; "
                    f"its module holds {shape} now, which is not saved. A table must keep its "
                    "rows: make it as large as it can become, or construct a new Checkpointer in "
                    "a new directory"
                )
        return None
