"""The state of optimizers that is not by row: as it is stored, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from cpr_ext.state.table import Table, is_row_state

_MOST_NAMED = 8  # parameters in one message


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's parameters in the order in which torch numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tree(
    optimizer: torch.optim.Optimizer, tables: Sequence[Table], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an optimizer's state that is not per row; ``values``: the model's, by name."""
    num_rows = {id(table.weight): table.num_embeddings for table in tables}
    states = {}
    for index, parameter in enumerate(parameters_of(optimizer)):
        rows = num_rows.get(id(parameter))
        states[str(index)] = {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if rows is None or not is_row_state(value, rows)
        }
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "type": type(optimizer).__name__,
        "groups": groups,
        "states": states,
        "parameters": _names(optimizer, values),
    }


def optimizer_differences(
    saved: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    values: Mapping[str, Any],
) -> list[str]:
    """Return what differs between stored and live optimizers, one sentence each."""
    live = [(type(o).__name__, len(o.param_groups), len(parameters_of(o))) for o in optimizers]
    stored = [(s["type"], len(s["groups"]), len(s["states"])) for s in saved]
    if live == stored:
        names = [_names(optimizer, values) for optimizer in optimizers]
        return [
            f"a {old['type']} has its parameters in groups {own}, in the store {old['parameters']}"
            for old, own in zip(saved, names, strict=True)
            if _are_named_alike(old.get("parameters", []), own)
            and [*map(sorted, old["parameters"])] != [*map(sorted, own)]
        ]
    found = [f"the store holds optimizers (type, groups, parameters) {stored}, the run has {live}"]
    if lacking := _lacking(saved, optimizers, values):
        named = ", ".join(f"'{name}'" for name in lacking[:_MOST_NAMED])
        rest = f" and {len(lacking) - _MOST_NAMED} more" if len(lacking) > _MOST_NAMED else ""
        found.append(f"the optimizer's state of {named}{rest} is not in the store")
    return found


def restore_optimizers(
    saved: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    values: Mapping[str, Any],
) -> None:
    """Put the settings and the state of optimizers back that are laid out as the stored ones.

    State made since the snapshot is dropped; that of rows is left to the shards.
    """
    num_rows = {id(table.weight): table.num_embeddings for table in tables}
    for optimizer, each in zip(optimizers, saved, strict=True):
        _restore_settings(optimizer, each)
        states = _in_order(each, _names(optimizer, values))
        for (parameter, group), state in zip(_grouped(optimizer), states, strict=True):
            rows = num_rows.get(id(parameter))
            live = {
                name: value
                for name, value in optimizer.state.pop(parameter, {}).items()
                if name in state or (rows is not None and is_row_state(value, rows))
            }
            if live := live | _restored(live, state, parameter, group):
                optimizer.state[parameter] = live


def take_optimizer_states(
    saved: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    values: Mapping[str, Any],
) -> None:
    """Put back the state of the parameters that have it in the store; all else stays unchanged.

    It is found by the names of parameters and the type of the optimizer; without names, by their
    order. Settings are those of the store if the optimizers are laid out alike.
    """
    are_alike = not optimizer_differences(saved, optimizers, values)
    for index, optimizer in enumerate(optimizers):
        if are_alike:
            _restore_settings(optimizer, saved[index])
        if are_alike and not any(chain(*saved[index].get("parameters", ()))):
            states = list(saved[index]["states"].values())
        else:
            known = _by_name(saved, optimizer)
            states = [known.get(name, {}) for name in chain(*_names(optimizer, values))]
        for (parameter, group), state in zip(_grouped(optimizer), states, strict=True):
            shapes = {v.shape for v in state.values() if isinstance(v, torch.Tensor) and v.dim()}
            if state and shapes <= {parameter.shape}:
                live = optimizer.state[parameter]
                live.update(_restored(live, state, parameter, group))


def _names(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of the parameters of each group; of one without a name: ""."""
    names = {id(value): name for name, value in values.items()}
    return [[names.get(id(each), "") for each in g["params"]] for g in optimizer.param_groups]


def _grouped(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(each, group) for group in optimizer.param_groups for each in group["params"]]


def _by_name(
    saved: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Return the stored states of parameters that an optimizer of this type had."""
    return {
        name: each["states"][str(index)]
        for each in saved
        if each["type"] == type(optimizer).__name__
        for index, name in enumerate(chain(*each.get("parameters", ())))
        if name
    }


def _lacking(
    saved: Sequence[dict[str, Any]],
    optimizers: Sequence[torch.optim.Optimizer],
    values: Mapping[str, Any],
) -> list[str]:
    """Return the names of parameters whose optimizer has state that is not stored."""
    lacking = []
    for optimizer in optimizers:
        known = _by_name(saved, optimizer)
        has_state = any(known.values()) or any(map(bool, optimizer.state.values()))
        names = chain(*_names(optimizer, values)) if has_state else ()
        lacking += [name for name in names if name and not known.get(name)]
    return lacking


def _in_order(saved: dict[str, Any], live: list[list[str]]) -> list[dict[str, Any]]:
    """Return the stored states in the order of the live optimizer's parameters."""
    stored, states = saved.get("parameters", []), saved["states"]
    if stored == live or not _are_named_alike(stored, live):
        return [states[str(index)] for index in range(len(states))]
    places = {name: index for index, name in enumerate(chain(*stored))}
    return [states[str(places[name])] for name in chain(*live)]


def _are_named_alike(stored: list[list[str]], live: list[list[str]]) -> bool:
    names = sorted(chain(*stored))
    return names == sorted(chain(*live)) and all(names) and len({*names}) == len(names)


def _restore_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in stored.items():
            group[name] = _restored_setting(group.get(name), value)


def _restored_setting(live: Any, saved: Any) -> Any:
    """Return a group's setting; a tensor (a learning rate) goes to the device of the live one."""
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(live.device, copy=True)
    return saved


def _restored(
    live: Mapping[str, Any],
    saved: Mapping[str, Any],
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        name: _restored_value(live.get(name), value, _device_of(name, value, parameter, group))
        for name, value in saved.items()
    }


def _device_of(
    name: str, saved: Any, parameter: torch.Tensor, group: Mapping[str, Any]
) -> torch.device:
    """Return where a state belongs: with its parameter, as torch's load_state_dict() has it.

    Step counters stay on the CPU unless the optimizer's kernels read them.
    """
    is_counter = isinstance(saved, torch.Tensor) and saved.dim() == 0 and name == "step"
    if is_counter and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device


def _restored_value(live: Any, saved: Any, device: torch.device) -> Any:
    if not isinstance(saved, torch.Tensor):
        return saved
    if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        return live.copy_(saved)
    return saved.to(device, copy=True)
