"""The state of optimizers under the names that TorchRec's optimizers load it by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cpr_ext.state.table import WEIGHT
from cpr_ext.wings.tools.maintenance.whole_tables import WholeArray

# TorchRec calls the first state of a fused optimizer "momentum1", others by FBGEMM's name.
_FIRST = ("sum", "exp_avg", "momentum_buffer")


def optimizer_state(
    rows: Mapping[str, Sequence[WholeArray]],
    optimizers: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter: ``{"users.weight": {"users.momentum1": ...}}``.

    Each range of columns may have one value per row of its own. These are laid end to end, in the
    order of the columns, as TorchRec does.

    Args:
        rows: the arrays per row of each table, by its weight's name.
        optimizers: of a dense part.
        names: of the dense part's parameters, the exported ones where these differ.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, arrays in rows.items():
        table = key.removesuffix(f".{WEIGHT}").rpartition(".")[2]
        pieces: dict[str, list[torch.Tensor]] = {}
        for array in arrays:
            pieces.setdefault(array.name.partition("[")[0], []).append(array.whole())
        first = next((name for name in _FIRST if name in pieces), None)
        state = {
            f"{table}.{'momentum1' if name == first else name}": torch.cat(parts)
            for name, parts in pieces.items()
        }
        if state:
            found[key] = state
    for optimizer in optimizers:
        parameters = [name for group in optimizer.get("parameters", ()) for name in group]
        for name, values in zip(parameters, optimizer["states"].values(), strict=False):
            plain = names.get(name, name)
            if values and plain and plain not in rows:
                found[plain] = dict(values)
    return found
