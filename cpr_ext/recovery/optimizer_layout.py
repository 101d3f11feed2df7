"""The optimizers of a stored dense part, laid out as those of a live model.

Where one job replicates a table that the other cuts, an optimizer has other parameters. A
checkpoint of another kind has state by the names of parameters, and no optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from cpr_ext.state.dense_schema import FUSED_STATE, OF_OPTIMIZERS
from cpr_ext.state.dense_state import generator_states

# The type of what a checkpoint of another kind says of optimizers: state by name, and no more.
IMPORTED = "Imported"
# The state that these optimizers make at their first step, of the weight's shape: zeros.
MADE_LATE: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}


def state_of(optimizers: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the stored state of the parameter of a name; none if there is none."""
    for optimizer in optimizers:
        for index, known in enumerate(_names(optimizer)):
            if known == name:
                state: dict[str, Any] = optimizer["states"][str(index)]
                return state
    return {}


def _names(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer.get("parameters", ()) for name in group]


def aligned(
    stored: Sequence[dict[str, Any]],
    live: Sequence[torch.optim.Optimizer],
    gone: Collection[str],
    changed: Mapping[int, dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return stored optimizers as ``live`` would be stored; as they are, if they are others.

    Optimizers and groups that have replicated tables alone are in one of the two jobs only.

    Args:
        gone: parameters of the stores that the live model holds otherwise.
        changed: the state that is not by row of live parameters that the stores hold otherwise.
    """
    left = [_without(optimizer, gone) for optimizer in stored]
    rest = iter([optimizer for optimizer in left if optimizer is not None])
    result = []
    for optimizer in live:
        mine = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        kept = [[key for key in group if key not in changed] for group in mine]
        is_new = all(group and not left for group, left in zip(mine, kept, strict=True))
        source = None if is_new else next(rest, None)
        if not is_new and not _fits(source, optimizer, mine, kept):
            return list(stored)
        result.append(_laid_out(source, optimizer, mine, changed))
    return list(stored) if next(rest, None) is not None else result


def _without(optimizer: dict[str, Any], gone: Collection[str]) -> dict[str, Any] | None:
    """Return a stored optimizer without these parameters; None if it had no others."""
    names = optimizer.get("parameters", [])
    if not any(name in gone for name in _names(optimizer)):
        return optimizer
    states, groups, kept_names, kept_states = iter(optimizer["states"].values()), [], [], []
    for group, of_group in zip(optimizer["groups"], names, strict=True):
        pairs = [(name, next(states)) for name in of_group]
        left = [(name, state) for name, state in pairs if name not in gone]
        if left or not pairs:
            groups.append(group)
            kept_names.append([name for name, _ in left])
            kept_states += [state for _, state in left]
    if not groups:
        return None
    numbered = {str(index): state for index, state in enumerate(kept_states)}
    return {**optimizer, "groups": groups, "parameters": kept_names, "states": numbered}


def _fits(
    source: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    mine: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
) -> bool:
    if source is None or source["type"] != type(optimizer).__name__:
        return False
    sizes = [len(left) for left, group in zip(kept, mine, strict=True) if left or not group]
    return [len(group) for group in source.get("parameters", ())] == sizes


def _laid_out(
    source: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    mine: Sequence[Sequence[int]],
    changed: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    old_groups: Iterator[Any] = iter(source["groups"] if source is not None else ())
    old_states = iter(source["states"].values() if source is not None else ())
    groups, states = [], []
    for group, keys in zip(optimizer.param_groups, mine, strict=True):
        is_new = bool(keys) and all(key in changed for key in keys)
        own = {name: value for name, value in group.items() if name != "params"}
        groups.append(own if is_new else next(old_groups))
        states += [changed[k] if k in changed else next(old_states) for k in keys]
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "states": {str(index): state for index, state in enumerate(states)},
        "parameters": [["" for _ in keys] for keys in mine],
    }


def take_imported(
    tree: dict[str, Any],
    live: Sequence[torch.optim.Optimizer],
    dense: Mapping[str, Any],
    changed: Mapping[int, dict[str, Any]],
) -> list[str]:
    """Lay out optimizer state that is known by name as ``live`` would be stored.

    Settings, generators and what fused optimizers know stay as they are, but for the steps.

    Returns:
        The parameters whose optimizer has state that is not there, one sentence each.
    """
    (imported,) = tree["optimizers"]
    names = {id(value): name for name, value in dense.items()}
    lacking, laid_out = [], []
    for optimizer in live:
        states: list[dict[str, Any]] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            name = names.get(id(parameter), "")
            known = changed.get(id(parameter), state_of([imported], name))
            states.append(dict(known))
            needs_state = type(optimizer) in MADE_LATE or optimizer.state.get(parameter)
            if name and needs_state and not known:
                lacking.append(f"the optimizer's state of '{name}' is not in the checkpoint")
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        laid_out.append(
            {
                "type": type(optimizer).__name__,
                "groups": settings,
                "states": {str(index): state for index, state in enumerate(states)},
            }
        )
    own = {n: v for n, v in dense.items() if n.startswith(OF_OPTIMIZERS)}
    if FUSED_STATE in own:
        own[FUSED_STATE] = {**own[FUSED_STATE], "iterations": tree["extra"]["step"]}
    tree["model"] |= own
    tree["optimizers"], tree["rng"] = laid_out, generator_states()
    return lacking
