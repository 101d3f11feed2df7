"""The tree of values that a dense part holds, checked before anything of it is used.

A checksum proves that a file is unchanged, not who wrote it. The state restored to a model, its
optimizers and the random number generators must have the form that ``capture_dense`` makes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from cpr_ext.errors import DamageError, StoreError
from cpr_ext.state.flatten import unpack
from cpr_ext.state.position import MAX_SOUND, Position

_MT_WORDS = 624
# How the names begin of what a model's state_dict() has of fused optimizers, and of wrappers.
OF_OPTIMIZERS = "fused_optimizers."
# Of fused optimizers: "iterations", "learning_rates", "max_counters".
FUSED_STATE = f"{OF_OPTIMIZERS}_extra_state"
_POSITION = {"step", "num_samples", "extra_state"}


def unpack_dense(skeleton: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tree of a dense part.

    Returns:
        ``model`` (state_dict name -> tensor, or what a module's ``get_extra_state()`` gave),
        ``table_keys`` (state_dict name -> table), ``optimizers`` (each ``type``, ``groups``,
        ``states``, and ``parameters``: of each group the state_dict names), ``rng``, ``extra`` (see
        :func:`read_position`, which checks it); ``wrapped`` (paths of modules that wrappers hold)
        since 0.2; ``grown`` (names of buffers whose form changed in training), if there are any;
        ``stateful`` (each ``type``, ``state``) if the run had such objects; ``unsaved_buffers``
        (name -> tensor) of a worker.

    Raises:
        DamageError: it is not such a tree.
    """
    try:
        tree = unpack(skeleton, _with_strides(skeleton, tensors))
        _check(tree)
    except (StoreError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        # RuntimeError: also RecursionError, and what torch says of a generator's state
        raise DamageError(f"not the dense part of a snapshot: {error}") from error
    assert isinstance(tree, dict)
    return tree


def _with_strides(skeleton: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in the memory layout that they had; values and shapes stay the same."""
    strides = skeleton.get("strides", {})
    if not strides:
        return tensors
    laid_out = dict(tensors)
    for name, stride in strides.items():
        if (tensor := tensors.get(name)) is None:
            continue  # of a part of the tree
        _require(_all(int, stride) and len(stride) == tensor.dim(), f"strides of {name!r:.100}")
        order = sorted(range(tensor.dim()), key=lambda i: (-stride[i], i))
        packed = tensor.permute(order).contiguous()
        laid_out[name] = packed.permute([order.index(i) for i in range(tensor.dim())])
    return laid_out


def read_position(tree: dict[str, Any]) -> Position:
    """Return the position in training that a tree of :func:`unpack_dense` holds.

    Raises:
        DamageError: it holds none.
    """
    extra = tree["extra"]
    known = _POSITION | {"rows_unsaved", "samples_lost", "ignored"}
    if not isinstance(extra, dict) or not _POSITION <= extra.keys() <= known:
        raise DamageError("not the dense part of a snapshot: it has no position in training")
    ignored = extra.get("ignored", [])
    if not isinstance(ignored, list) or not _all(str, ignored):
        raise DamageError("not the dense part of a snapshot: its list of ignored state")
    for name in extra.keys() - {"extra_state", "ignored"}:
        value = extra[name]
        if name == "rows_unsaved" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SOUND:
            raise DamageError(f"not the dense part of a snapshot: its {name} is {value!r:.100}")
    return Position(**extra)


def is_extra_state(name: str) -> bool:
    """Return whether a state_dict name is that of a module's ``get_extra_state()``."""
    return name.rpartition(".")[2] == "_extra_state"


def _check(tree: Any) -> None:
    _require(isinstance(tree, dict), "it is no tree")
    model, optimizers = tree["model"], tree["optimizers"]
    _require(_has_names(model), "its parameters have no names")
    for name, value in model.items():
        good = isinstance(value, torch.Tensor) or is_extra_state(name)
        _require(good, f"parameter {name!r} is no tensor")
    table_keys = tree["table_keys"]
    _require(_has_names(table_keys) and _all(str, table_keys.values()), "its table_keys")
    wrapped = tree.get("wrapped", [])
    _require(isinstance(wrapped, list) and _all(str, wrapped), "its wrapped modules")
    grown = tree.get("grown", [])
    _require(isinstance(grown, list) and _all(str, grown), "its buffers that grow")
    _require(_all(dict, optimizers), "its optimizers")
    for optimizer in optimizers:
        groups, states = optimizer["groups"], optimizer["states"]
        _require(isinstance(optimizer["type"], str), "an optimizer's type")
        good = _all(dict, groups) and not any("params" in group for group in groups)
        _require(good, "an optimizer's parameter groups")
        numbers = [str(index) for index in range(len(states))]
        good = isinstance(states, dict) and list(states) == numbers
        _require(good and _all(dict, states.values()), "an optimizer's states")
        names = optimizer.get("parameters", [])
        good = isinstance(names, list) and _all(list, names) and len(names) in (0, len(groups))
        _require(good and all(_all(str, group) for group in names), "an optimizer's parameters")
        _require(not names or sum(map(len, names)) == len(states), "an optimizer's parameters")
    stateful = tree.get("stateful", [])
    good = isinstance(stateful, list) and _all(dict, stateful)
    _require(
        good and all(isinstance(s["type"], str) and "state" in s for s in stateful),
        "the states of stateful objects",
    )
    unsaved = tree.get("unsaved_buffers", {})
    _require(_has_names(unsaved) and _all(torch.Tensor, unsaved.values()), "its unsaved buffers")
    _require("extra" in tree, "it has no position")
    _check_generators(tree["rng"])


def _check_generators(rng: dict[str, Any]) -> None:
    """Try the states on generators that nobody uses, and what those would believe unseen."""
    torch.Generator().set_state(rng["torch"])
    version, words, gauss_next = rng["python"]
    random.Random().setstate((version, words, gauss_next))
    _require(gauss_next is None or isinstance(gauss_next, float), "Python's generator")
    kind, keys, position, has_gauss, cached = rng["numpy"]
    good = (
        kind == "MT19937"
        and isinstance(keys, np.ndarray)
        and (keys.dtype, keys.shape) == (np.uint32, (_MT_WORDS,))
        and _all(int, (position, has_gauss))
        and 0 <= position <= _MT_WORDS
        and has_gauss in (0, 1)
        and isinstance(cached, float)
    )
    _require(good, "NumPy's generator")
    for state in rng.get("cuda", ()):
        good = isinstance(state, torch.Tensor) and (state.dtype, state.dim()) == (torch.uint8, 1)
        _require(good and state.numel() <= 64, "a CUDA generator")


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and _all(str, value)


def _all(kind: type, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


def _require(is_good: bool, what: str) -> None:
    if not is_good:
        raise ValueError(what)
