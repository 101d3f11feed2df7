"""Trees of plain values and tensors, taken apart into JSON and named tensors, and put back.

This is what keeps pickle out: a tree that is not made of the types below is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes

_ALLOWED = "None, bool, int, float, str, list, tuple, dict, numpy scalars and arrays, torch.Tensor"
# Types of values that a skeleton holds as they are; a float may be none of JSON.
_PLAIN = frozenset((type(None), bool, int, str))


def pack(tree: Any, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Take ``tree`` apart.

    Args:
        tree: nested dicts, lists and tuples of plain values and tensors.
        name: prefix of the tensors' names.

    Returns:
        A JSON-able skeleton, and the tensors by name (not copied, as they are).

    Raises:
        UsageError: a value of another type; names its place in the tree.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(tree, name, tensors), tensors


def unpack(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Invert :func:`pack`. Raises StoreError if the skeleton is not one that ``pack`` makes."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (tag, value), *_ = skeleton.items()
        if tag == "$tensor":
            return _named(tensors, value)
        if tag == "$array":
            return _named(tensors, value).numpy()
        if tag == "$float":
            return float(value)
        if tag == "$tuple":
            return tuple(unpack(item, tensors) for item in value)
        if tag == "$dict":
            return {unpack(k, tensors): unpack(v, tensors) for k, v in value}
    return {key: unpack(value, tensors) for key, value in skeleton.items()}


def tensor_names(skeleton: Any) -> list[str]:
    """Return the names of the tensors that a skeleton of :func:`pack` refers to."""
    if isinstance(skeleton, list):
        if _PLAIN.issuperset(map(type, skeleton)):
            return []
        return [name for item in skeleton for name in tensor_names(item)]
    if not isinstance(skeleton, dict):
        return []
    if len(skeleton) == 1 and isinstance(name := next(iter(skeleton.values())), str):
        return [name] if skeleton.keys() & {"$tensor", "$array"} else []
    return [name for value in skeleton.values() for name in tensor_names(value)]


def _named(tensors: dict[str, torch.Tensor], name: Any) -> torch.Tensor:
    if name not in tensors:
        raise StoreError(f"the packed tree names a tensor {name!r} that is not in the file")
    return tensors[name]


def _add(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> str:
    """Add ``tensor`` under a name of its own: {"a": {"b": t}, "a.b": u} has two of one path."""
    unique, copies = name, 1
    while unique in tensors:
        copies += 1
        unique = f"{name}#{copies}"
    tensors[unique] = tensor
    return unique


def _pack_items(items: Sequence[Any], name: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    if _PLAIN.issuperset(map(type, items)):  # such as the 625 numbers of Python's generator
        return list(items)
    return [_pack(item, f"{name}.{i}", tensors) for i, item in enumerate(items)]


def _pack(tree: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, torch.Tensor):
        if tree.layout != torch.strided or tree.is_quantized or tree.dtype not in DTYPE_NAMES:
            raise UsageError(
                f"{name or 'the tree'} is a tensor of {tree.dtype}, {tree.layout}; can be stored: "
                f"strided tensors of {list_dtypes()}"
            )
        return {"$tensor": _add(tensors, name, tree.detach())}
    if isinstance(tree, np.ndarray):
        try:
            tensor = torch.from_numpy(np.array(tree, order="C"))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name or 'the tree'} is an array of {tree.dtype}; can be stored: {list_dtypes()}"
            ) from error
        return {"$array": _pack(tensor, name, tensors)["$tensor"]}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"$float": repr(tree)}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, list):
        return _pack_items(tree, name, tensors)
    if isinstance(tree, tuple):
        return {"$tuple": _pack_items(tree, name, tensors)}
    if isinstance(tree, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
        items = [(key, _pack(value, f"{name}.{key}", tensors)) for key, value in tree.items()]
        if plain:
            return dict(items)
        return {"$dict": [[_pack(key, name, tensors), value] for key, value in items]}
    raise UsageError(
        f"{name or 'the tree'} is a {type(tree).__name__}; allowed: {_ALLOWED}. "
        "Convert it, for example through its own state_dict()"
    )
