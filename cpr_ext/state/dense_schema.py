"""The form of the dense state's tree: to JSON and tensors, and checked on the way back."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES, list_dtypes
from cpr_ext.state.position import MAX_SOUND, Position

_ALLOWED = (
    "None, bool, int, float, str, list, tuple, dict, OrderedDict, Counter, numpy scalars and "
    "arrays, torch.Tensor; no type that derives from one of these"
)
# Types of values that a skeleton holds as they are; a float may be none of JSON.
_PLAIN = frozenset((type(None), bool, int, str))
_NUMBERS = _PLAIN - {str}
_KEYS = _PLAIN | {float, tuple}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_MOST_LEVELS = 100
# Of a tensor, in a file that is read.
MAX_NAME = 4096
MAX_DIMENSIONS = 32
_MOST_DIGITS = 4000  # of an int; longer ones Python does not read as text
# Dtypes that are stored as others of the same bits.
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_FLOAT8: dict[str, torch.dtype] = {
    f"${name}": getattr(torch, name)
    for name in (
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
}
_FLOAT8_TAGS = {dtype: tag for tag, dtype in _FLOAT8.items()}


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
    packer = _Packer()
    return packer.pack(tree, name, 0), packer.tensors


def unpack(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Invert :func:`pack`. Raises StoreError if the skeleton is not one that ``pack`` makes."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (tag, value), *_ = skeleton.items()
        if tag in _UNPACKED:
            return _UNPACKED[tag](value, tensors)
        if tag in _FLOAT8:
            return unpack(value, tensors).view(_FLOAT8[tag])
    return {key: unpack(value, tensors) for key, value in skeleton.items()}


def _named(name: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if name not in tensors:
        raise StoreError(f"the packed tree names a tensor {name!r} that is not in the file")
    return tensors[name]


def _pairs(value: Any, tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
    return {unpack(key, tensors): unpack(item, tensors) for key, item in value}


_UNPACKED: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    "$tensor": _named,
    "$complex": lambda value, tensors: torch.view_as_complex(unpack(value, tensors)),
    "$array": lambda value, tensors: (
        _named if isinstance(value, str) else unpack  # of complex numbers
    )(value, tensors).numpy(),
    "$scalar": lambda value, tensors: unpack(value, tensors).numpy()[()],
    "$float": lambda value, _: float(np.frombuffer(bytes.fromhex(value), ">f8").item()),
    "$tuple": lambda value, tensors: tuple(unpack(item, tensors) for item in value),
    "$dict": _pairs,
    "$ordered": lambda value, tensors: OrderedDict(_pairs(value, tensors)),
    "$counter": lambda value, tensors: Counter(_pairs(value, tensors)),
}


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


class _Packer:
    """Takes one tree apart.

    Attributes:
        tensors: found so far, by a name of each: {"a": {"b": t}, "a.b": u} has two of one path.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, tree: Any, name: str, level: int) -> Any:
        """Return the skeleton of a part of the tree."""
        kind = type(tree)
        if level > _MOST_LEVELS:
            raise UsageError(f"{name:.200} is nested more than {_MOST_LEVELS} levels deep")
        if kind is str:
            _require_text(tree, name)
        if kind is int:
            _require_digits(tree, name)
        if kind in _PLAIN:
            return tree
        if kind is float:
            is_of_json = math.isfinite(tree)
            return tree if is_of_json else {"$float": np.array(tree, ">f8").tobytes().hex()}
        if kind is list:
            return self._items(tree, name, level)
        if kind is tuple:
            return {"$tuple": self._items(tree, name, level)}
        if kind in _MAPPINGS:
            return self._mapping(tree, name, level)
        if kind is torch.Tensor:
            return self._tensor(tree, name)
        if kind is np.ndarray:
            packed = self._array(tree, name)
            return {"$array": packed.get("$tensor", packed)}
        if isinstance(tree, np.generic):
            return {"$scalar": self._array(np.asarray(tree), name)}
        raise UsageError(
            f"{name or 'the tree'} is a {kind.__qualname__}; allowed: {_ALLOWED}. Convert it, for "
            "example through its own state_dict()"
        )

    def _items(self, items: Sequence[Any], name: str, level: int) -> list[Any]:
        if _NUMBERS.issuperset(map(type, items)):  # such as the 625 of Python's generator
            _require_digits(max(map(abs, filter(None, items)), default=0), name)
            return list(items)
        return [self.pack(item, f"{name}.{i}", level + 1) for i, item in enumerate(items)]

    def _mapping(self, tree: Any, name: str, level: int) -> Any:
        for key in tree:
            if type(key) not in _KEYS:
                raise UsageError(
                    f"{name or 'the tree'} has a key {key!r:.100} of type {type(key).__name__}; "
                    "allowed: None, bool, int, float, str, tuple"
                )
            if type(key) is str:
                _require_text(key, name)
        items = [(key, self.pack(value, f"{name}.{key}", level + 1)) for key, value in tree.items()]
        if type(tree) is dict and all(type(k) is str and not k.startswith("$") for k in tree):
            return dict(items)
        return {_MAPPINGS[type(tree)]: [[self.pack(k, name, level + 1), v] for k, v in items]}

    def _tensor(self, tensor: torch.Tensor, name: str) -> dict[str, Any]:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized
        if is_plain and tensor.dtype in _COMPLEX:
            return {"$complex": self._tensor(torch.view_as_real(tensor), name)}
        if is_plain and tensor.dtype in _FLOAT8_TAGS:
            return {_FLOAT8_TAGS[tensor.dtype]: self._tensor(tensor.view(torch.uint8), name)}
        if not is_plain or tensor.dtype not in DTYPE_NAMES:
            raise UsageError(
                f"{name or 'the tree'} is a tensor of {tensor.dtype}, {tensor.layout}; can be "
                f"stored: strided tensors of {list_dtypes()}, complex, and float8"
            )
        if tensor.dim() > MAX_DIMENSIONS:
            raise UsageError(
                f"{name:.200} has {tensor.dim()} dimensions; at most {MAX_DIMENSIONS} can be stored"
            )
        if len(name) > MAX_NAME - 20:
            raise UsageError(
                f"{name:.200} has a name of {len(name)} letters; use shorter keys: at most "
                f"{MAX_NAME - 20} can be stored"
            )
        unique, copies = name, 1
        while unique in self.tensors:
            copies += 1
            unique = f"{name}#{copies}"
        self.tensors[unique] = tensor
        return {"$tensor": unique}

    def _array(self, array: np.ndarray[Any, Any], name: str) -> dict[str, Any]:
        try:
            tensor = torch.from_numpy(np.array(array, order="C"))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name or 'the tree'} is of numpy's {array.dtype}; can be stored: "
                f"{list_dtypes()}, complex"
            ) from error
        return self._tensor(tensor, name)


def _require_digits(number: int, name: str) -> None:
    if number.bit_length() > 3 * _MOST_DIGITS:
        raise UsageError(
            f"{name or 'the tree'} has an int of {number.bit_length()} bits; at most "
            f"{3 * _MOST_DIGITS} can be stored"
        )


def _require_text(text: str, name: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{name or 'the tree'}: {text!r:.100} is no text: {error}") from error


_MT_WORDS = 624
# How the names begin of what a model's state_dict() has of fused optimizers, and of wrappers.
OF_OPTIMIZERS = "fused_optimizers."
# Of fused optimizers: "iterations", "learning_rates", "max_counters".
FUSED_STATE = f"{OF_OPTIMIZERS}_extra_state"
_POSITION = {"step", "num_samples", "values"}


def unpack_dense(skeleton: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tree of a dense part.

    Returns:
        ``model`` (state_dict name -> tensor, or what a module's ``get_extra_state()`` gave),
        ``table_keys`` (state_dict name -> table), ``optimizers`` (each ``type``, ``groups``,
        ``states``, ``parameters``: of each group the state_dict names; and ``others``: state under
        other keys, if there is any), ``rng``, ``extra`` (see :func:`read_position`, which checks
        it); ``wrapped`` (paths of modules that wrappers hold)
        since 0.2; ``grown`` (names of buffers whose form changed in training), if there are any;
        ``state`` (name -> ``type``, ``state``) of the user's objects; ``unsaved_buffers`` (name ->
        tensor) of a worker.

    Raises:
        DamageError: it is not such a tree.
    """
    try:
        tree = unpack(skeleton, _with_strides(skeleton, tensors))
        _check(tree)
    except MemoryError:
        raise  # of this machine, not of the tree
    except Exception as error:  # of whatever a tree may hold
        what = error if isinstance(error, StoreError | ValueError) else repr(error)
        raise DamageError(f"not the dense part of a snapshot: {what!s:.300}") from error
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
    known = _POSITION | {"rows_unsaved", "samples_lost"}
    if not isinstance(extra, dict) or not _POSITION <= extra.keys() <= known:
        raise DamageError("not the dense part of a snapshot: it has no position in training")
    if not _has_names(extra["values"]):
        raise DamageError("not the dense part of a snapshot: its values have no names")
    for name in extra.keys() - {"values"}:
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
        flags = [group.get(flag) for group in groups for flag in ("fused", "capturable")]
        good = good and not any(isinstance(flag, torch.Tensor | np.ndarray) for flag in flags)
        _require(good, "an optimizer's parameter groups")
        numbers = [str(index) for index in range(len(states))]
        good = isinstance(states, dict) and list(states) == numbers
        _require(good and _all(dict, states.values()), "an optimizer's states")
        names = optimizer.get("parameters", [])
        good = isinstance(names, list) and _all(list, names) and len(names) in (0, len(groups))
        _require(good and all(_all(str, group) for group in names), "an optimizer's parameters")
        _require(not names or sum(map(len, names)) == len(states), "an optimizer's parameters")
        _require(isinstance(optimizer.get("others", {}), dict), "an optimizer's other state")
    state = tree.get("state", {})
    _require(
        _has_names(state)
        and _all(dict, state.values())
        and all(isinstance(each["type"], str) and "state" in each for each in state.values()),
        "the states of the user's objects",
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
