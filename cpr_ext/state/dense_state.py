"""The dense part of a snapshot: all that is not a table row.

Parameters and buffers of the model, optimizer state that is not per row, and random number
generators. Also the state that the caller names, and the position in training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cpr_ext._native import native
from cpr_ext.errors import NanError, StoreError, UsageError
from cpr_ext.runtime.log_text import logger_of
from cpr_ext.state.dense_schema import (
    OF_OPTIMIZERS,
    is_extra_state,
    pack,
    tensor_names,
    unpack_dense,
)
from cpr_ext.state.grown_buffers import (
    BufferForms,
    grown_buffers,
    is_growing,
    make_grown_buffers,
    put_back,
    restore_unsaved_buffers,
)
from cpr_ext.state.stateful import (
    Declared,
    capture_state,
    restore_state,
    state_differences,
)
from cpr_ext.state.table import Table, is_row_state
from cpr_ext.state.wrapper_names import match_names, wrapped_modules

logger = logger_of("saving")

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
    tree = {
        "type": type(optimizer).__name__,
        "groups": groups,
        "states": states,
        "parameters": _names(optimizer, values),
    }
    others = {key: value for key, value in optimizer.state.items() if not _is_tensor(key)}
    return tree | ({"others": others} if others else {})


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
        _restore_others(optimizer, each.get("others", {}))
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


def _restore_others(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Put back the state that is under keys that are no parameters."""
    state: Any = optimizer.state
    live = {key: state.pop(key) for key in list(state) if not _is_tensor(key)}
    for key, value in saved.items():
        state[key] = put_back(live.get(key), value)


def _is_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor)


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
    written: dict[int, Any] = {}  # tensors that groups share, which may have had different values
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in stored.items():
            live = group.get(name)
            place, device = id(live), getattr(live, "device", None)
            if isinstance(value, torch.Tensor) and not torch.equal(
                written.setdefault(place, value), value
            ):
                live = None
            group[name] = put_back(live, value, device)


def _restored(
    live: Mapping[str, Any],
    saved: Mapping[str, Any],
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        name: put_back(live.get(name), value, _device_of(name, value, parameter, group))
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


@dataclass(frozen=True)
class DensePart:
    """A captured dense part: a JSON-able skeleton and copies of its tensors, on the CPU.

    Attributes:
        names: what the tree calls a parameter, by its stored name, where that is another.
    """

    skeleton: Any
    tensors: dict[str, torch.Tensor]
    names: Mapping[str, str] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """Return what it holds, see :func:`unpack_dense`; raises DamageError."""
        tree, names = unpack_dense(self.skeleton, self.tensors), self.names
        if names:
            tree["model"] = {names.get(k, k): value for k, value in tree["model"].items()}
        for optimizer in tree["optimizers"] if names else ():
            groups = optimizer.get("parameters", ())
            optimizer["parameters"] = [[names.get(n, n) for n in group] for group in groups]
        return tree

    @staticmethod
    def of_tree(tree: Mapping[str, Any]) -> DensePart:
        """Return a part of which :meth:`tree` returns ``tree``; its tensors are not copied."""
        return DensePart(*pack(dict(tree), "dense"))

    def named_as_in(self, model: nn.Module, tables: Sequence[Table]) -> DensePart:
        """Return the same with a live model's names where only wrappers differ."""
        return replace(self, names=match_names(self.tree()["model"], dense_values(model, tables)))


def content_digest(part: DensePart) -> bytes:
    """Return a digest of a captured dense part, but for generators and the position."""
    left_out = ("rng", "extra")
    skeleton = {name: value for name, value in part.skeleton.items() if name not in left_out}
    digest = hashlib.blake2b(json.dumps(skeleton, sort_keys=True).encode(), digest_size=16)
    prefixes = tuple(f"dense.{name}." for name in left_out)
    for name, tensor in sorted(part.tensors.items()):
        if not name.startswith(prefixes):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def without_optimizers(part: DensePart) -> DensePart:
    """Return what of a captured dense part the model computes with."""
    tree = part.tree()
    model = {n: v for n, v in tree["model"].items() if not n.startswith(OF_OPTIMIZERS)}
    return DensePart.of_tree({**tree, "model": model, "optimizers": [], "state": {}})


def capture_dense(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    extra: Any,
    declared: Declared = Declared(),  # noqa: B008 - it is frozen
    forms: BufferForms | None = None,
    values: Mapping[str, Any] | None = None,
) -> DensePart:
    """Copy everything that is not a table row, as it is now.

    Args:
        forms: those of buffers when the Checkpointer was made.
        values: the model's ``state_dict(keep_vars=True)``; None: asked for.
    """
    table_names = {id(table.weight): table.name for table in tables}
    keys = _key_ids(tables)
    if values is None:
        values = model.state_dict(keep_vars=True)
    tree = {
        "model": {
            name: _as_tensor(value)
            for name, value in values.items()
            if id(value) not in table_names and id(value) not in keys
        },
        "table_keys": {
            name: table_names[id(value)]
            for name, value in values.items()
            if id(value) in table_names
        },
        "optimizers": [optimizer_tree(optimizer, tables, values) for optimizer in optimizers],
        "wrapped": wrapped_modules(model),
        "rng": generator_states(),
        "extra": extra,
    }
    if declared.objects:
        tree["state"] = capture_state(declared.objects)
    if grown := grown_buffers(model, forms or {}):
        tree["grown"] = grown
    skeleton, tensors = pack(tree, "dense")
    strides = {
        name: list(tensor.stride()) for name, tensor in tensors.items() if _is_permuted(tensor)
    }
    if strides:
        skeleton["strides"] = strides
    return DensePart(
        skeleton,
        {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in tensors.items()
        },
    )


def _as_tensor(value: Any) -> Any:
    """Return a parameter's values: what it is, the live model knows."""
    return value.detach() if isinstance(value, nn.Parameter) else value


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Return whether it fills its memory in another order than that of its dimensions."""
    return not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride()


def require_savable(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tables: Sequence[Table]
) -> None:
    """Raise UsageError for what a snapshot cannot hold, before training begins."""
    for name, module in model.named_modules():
        if _gives_rows_to_other_ids(module):
            raise UsageError(
                f"'{name}' is a {type(module).__name__}: while training runs, it gives rows to "
                "other ids (managed collisions, ZCH), so rows must be saved with their ids. Use "
                "cpr_ext.integrations.torchrec.make_checkpointer, which does so"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter '{name}' has no shape yet (a lazy module); call the model once, with "
                "a batch, before you make the Checkpointer"
            )
    for table in tables:
        table.refuse_sparse_momentum()
    values = model.state_dict(keep_vars=True)
    weights = {id(table.weight) for table in tables}
    own = {name: _as_tensor(value) for name, value in values.items() if id(value) not in weights}
    pack(own, "dense.model")
    trees = [optimizer_tree(optimizer, tables, values) for optimizer in optimizers]
    pack(trees, "dense.optimizers")


def _gives_rows_to_other_ids(module: nn.Module) -> bool:
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torchrec.")]
    return any("ManagedCollision" in kind.__name__ for kind in kinds)


def own_part(
    part: DensePart,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    declared: Declared = Declared(),  # noqa: B008 - it is frozen
) -> DensePart:
    """Return what of a captured dense part one worker has of its own, for :func:`restore_own_part`.

    Buffers, generators, position, values, and the state of optimizers that update tables only. Of
    the user's objects, those that each process has for itself.
    """
    parameters = {
        name
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter)
    }
    values = part.skeleton["model"]
    skeleton = {
        **_with_optimizers(part, optimizers, tables, are_shared=False),
        "model": {name: value for name, value in values.items() if name not in parameters},
    }
    if own := declared.own_values(skeleton.pop("state", {})):
        skeleton["state"] = own
    return DensePart(skeleton, {name: part.tensors[name] for name in tensor_names(skeleton)})


def shared_part(
    part: DensePart, optimizers: Sequence[torch.optim.Optimizer], tables: Sequence[Table]
) -> DensePart:
    """Return a captured dense part without the state of optimizers that update tables only."""
    skeleton = _with_optimizers(part, optimizers, tables, are_shared=True)
    return DensePart(skeleton, {name: part.tensors[name] for name in tensor_names(skeleton)})


def _with_optimizers(
    part: DensePart,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    *,
    are_shared: bool,
) -> dict[str, Any]:
    """Return the skeleton with the trees of some of the optimizers."""
    shared = {id(optimizer) for optimizer in shared_optimizers(optimizers, tables)}
    pairs = zip(optimizers, part.skeleton["optimizers"], strict=True)
    kept = [tree for optimizer, tree in pairs if (id(optimizer) in shared) == are_shared]
    return {**part.skeleton, "optimizers": kept}


def restore_own_part(
    part: DensePart,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    declared: Declared = Declared(),  # noqa: B008 - it is frozen
) -> None:
    """Put back what :func:`own_part` returned; all else stays unchanged."""
    shared = {id(optimizer) for optimizer in shared_optimizers(optimizers, tables)}
    own = [optimizer for optimizer in optimizers if id(optimizer) not in shared]
    restore_dense(part, model, own, tables, is_own=True, declared=declared)


def refuse_nan(part: DensePart) -> None:
    """Raise NanError, naming the parameter, if one of the model's holds NaN."""
    for name, tensor in part.tensors.items():
        if name.startswith("dense.model.") and native.find_nan(tensor) >= 0:
            raise NanError(
                f"parameter '{name.removeprefix('dense.model.')}' holds NaN; the snapshot is "
                "aborted and earlier ones are kept. Look for divergence, or save NaN with "
                'StoreOptions(on_nan="save")'
            )


def restore_dense(
    part: DensePart,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    *,
    strict: bool = True,
    is_own: bool = False,
    generators: bool = True,
    buffers: bool = True,
    declared: Declared = Declared(),  # noqa: B008 - it is frozen
    keep: Collection[str] = (),
) -> Any:
    """Put a captured dense part back, in place; returns what was captured as ``extra``.

    Args:
        strict: False restores the parameters, and the optimizers' state of them, that match; all
            else stays unchanged.
        is_own: it is of :func:`own_part`, and lacks what workers share.
        generators: put random number generators back, too.
        buffers: put the model's buffers back, too.
        declared: its objects take their states back; without any captured they stay unchanged.
        keep: names of those that stay unchanged.

    Raises:
        StoreError: the model, the optimizers or the objects are not those of the snapshot. Nothing
            was changed, except the user's objects before one that refuses its state.
        DamageError: it is no dense part; nothing was changed.
    """
    tree = part.tree()
    live = dense_values(model, tables)
    if strict and not is_own:
        _require_same(dense_differences(part, model, optimizers, tables, declared))
    restore_state(tree.get("state", {}), declared.objects, keep)
    make_grown_buffers(model, tree["model"], tree.get("grown", ()))
    live = dense_values(model, tables)
    values, saved = model.state_dict(keep_vars=True), tree["optimizers"]
    with torch.no_grad():
        _load_model(
            model,
            {
                name: tree["model"][name]
                for name in live
                if (buffers or isinstance(live[name], nn.Parameter))
                and not _parameter_difference(name, tree["model"], live)
            },
        )
        if not strict:
            take_optimizer_states(saved, optimizers, values)
        elif not is_own or not optimizer_differences(saved, optimizers, values):
            restore_optimizers(saved, optimizers, tables, values)
    if buffers:
        restore_unsaved_buffers(tree, model, tables)
    if generators:
        restore_generators(tree["rng"])
    return tree["extra"]


def _require_same(differences: Sequence[str]) -> None:
    if differences:
        raise StoreError(
            f"{'; '.join(differences)}. Build what the store was made with; or, in a new "
            "directory, take what matches: recover(from_store=..., strict=False). For evaluation, "
            "cpr_ext.load_into(model, store) needs no optimizers"
        )


def _load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a part of the state that ``state_dict()`` returned, through the modules themselves.

    It may have returned copies, which only the module knows how to load. A module that loads
    nothing of it gets the values copied.
    """
    try:
        model.load_state_dict(dict(state), strict=False)
    except (KeyError, RuntimeError) as error:  # a module that wants all of its own names
        logger.warning("the model's load_state_dict() refused a part of its state: %s", error)
    for name, value in model.state_dict(keep_vars=True).items():
        saved = state.get(name)
        if isinstance(saved, torch.Tensor) and isinstance(value, torch.Tensor):
            if not _has_same_bits(value, saved):
                value.copy_(saved)
        elif isinstance(saved, torch.Tensor):
            logger.warning("'%s' is not a tensor of the model any more", name)


def _has_same_bits(live: torch.Tensor, saved: torch.Tensor) -> bool:
    if (live.shape, live.dtype) != (saved.shape, saved.dtype):
        return False
    left, right = (each.detach().to("cpu").contiguous().reshape(-1) for each in (live, saved))
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def shared_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tables: Sequence[Table]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that update more than tables: those that workers share."""
    weights = {id(table.weight) for table in tables}
    return [o for o in optimizers if any(id(value) not in weights for value in parameters_of(o))]


def dense_differences(
    part: DensePart,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    tables: Sequence[Table],
    declared: Declared = Declared(),  # noqa: B008 - it is frozen
) -> list[str]:
    """Return what differs between a captured dense part and a live model, one sentence each."""
    tree = part.tree()
    saved, live = tree["model"], dense_values(model, tables)
    grown = tree.get("grown", ())
    found = [
        _parameter_difference(name, saved, live)
        for name in sorted(saved.keys() | live)
        if not is_growing(model, name, grown)
    ]
    return [
        *(text for text in found if text),
        *optimizer_differences(tree["optimizers"], optimizers, model.state_dict(keep_vars=True)),
        *state_differences(tree.get("state", {}), declared.objects),
    ]


def dense_values(model: nn.Module, tables: Sequence[Table]) -> dict[str, Any]:
    """Return what of the model's ``state_dict()`` belongs to no row of a table; not copied."""
    table_ids = {id(table.weight) for table in tables} | _key_ids(tables)
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) not in table_ids
    }


def _key_ids(tables: Sequence[Table]) -> set[int]:
    """Return the ids of key arrays, which may be buffers of the model; they belong to rows."""
    return {id(array) for table in tables for array in table.key_arrays().values()}


def _parameter_difference(name: str, saved: dict[str, Any], live: dict[str, Any]) -> str | None:
    if name not in live or name not in saved:
        where = "model" if name not in live else "store"
        return f"parameter '{name}' is not in the {where}"
    if is_extra_state(name):
        return None
    stored, wanted = ((p[name].dtype, tuple(p[name].shape)) for p in (saved, live))
    if stored == wanted:
        return None
    return (
        f"parameter '{name}' has dtype {stored[0]} and shape {stored[1]} in the store, "
        f"{wanted[0]} and {wanted[1]} in the model"
    )


def generator_states() -> dict[str, Any]:
    """Return the states of torch, NumPy and Python, for :func:`restore_generators`."""
    tree: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the generator users' code shares
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        tree["cuda"] = torch.cuda.get_rng_state_all()
    return tree


def restore_generators(tree: dict[str, Any]) -> None:
    """Put the states of random number generators back."""
    torch.set_rng_state(tree["torch"])
    np.random.set_state(tree["numpy"])  # noqa: NPY002
    random.setstate(tree["python"])
    if "cuda" in tree and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(tree["cuda"][: torch.cuda.device_count()])
