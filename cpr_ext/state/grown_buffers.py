"""Buffers that grow, and those that ``state_dict()`` leaves out; tensors are filled in place."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cpr_ext.state.table import Table


def put_back(live: Any, saved: Any, device: torch.device | None = None) -> Any:
    """Return what takes the place of ``live``: that itself, where shape and dtype fit.

    Args:
        live: is overwritten; in dicts, lists and tuples each tensor by that in its place.
        saved: stays as it is.
        device: of a tensor in whose place none fits; None: that of the one there.
    """
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor):
            return saved.to(saved.device if device is None else device, copy=True)
        if (live.shape, live.dtype, live.layout) == (saved.shape, saved.dtype, saved.layout):
            with torch.no_grad():
                return live.copy_(saved)
        return saved.to(live.device if device is None else device, copy=True)
    if type(saved) is dict:
        there = live if isinstance(live, dict) else {}
        return {key: put_back(there.get(key), value, device) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        fits = isinstance(live, list | tuple) and len(live) == len(saved)
        places = live if fits else [None] * len(saved)
        return type(saved)(put_back(*each, device) for each in zip(places, saved, strict=True))
    return copy.deepcopy(saved)


#: The dtype and shape of each buffer; None: the module has no tensor there.
BufferForms = Mapping[str, tuple[torch.dtype, torch.Size] | None]


def buffer_forms(model: nn.Module) -> BufferForms:
    """Return the form of each buffer that the model's ``state_dict()`` has, or may have later."""
    return {
        name: None if buffer is None else (buffer.dtype, buffer.shape)
        for name, _, _, buffer in _buffers(model)
    }


def grown_buffers(model: nn.Module, before: BufferForms) -> list[str]:
    """Return the names of the buffers that have another form than before."""
    now = buffer_forms(model)
    return sorted(name for name in now.keys() & before.keys() if now[name] != before[name])


def is_growing(model: nn.Module, name: str, grown: Collection[str]) -> bool:
    """Return whether a snapshot's buffer may have another form than the model's."""
    return name in grown and any(name == known for known, _, _, _ in _buffers(model))


def make_grown_buffers(model: nn.Module, saved: Mapping[str, Any], grown: Collection[str]) -> None:
    """Give buffers the form that they have in a snapshot; their values are loaded later."""
    for name, module, leaf, buffer in [*_buffers(model)]:
        if name not in grown:
            continue
        value = saved.get(name)
        if not isinstance(value, torch.Tensor):
            module._buffers[leaf] = None
        elif buffer is None or (buffer.dtype, buffer.shape) != (value.dtype, value.shape):
            device = _device_of(module) if buffer is None else buffer.device
            module._buffers[leaf] = torch.zeros(value.shape, dtype=value.dtype, device=device)


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor | None]]:
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}" if path else leaf, module, leaf, buffer


def _device_of(module: nn.Module) -> torch.device | None:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else None


_KEY = "unsaved_buffers"


def copy_unsaved_buffers(
    model: nn.Module, tables: Sequence[Table]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return copies of the model's buffers that no snapshot has.

    Returns:
        What a dense part's skeleton gets of them, and its tensors; both empty if there are none.
    """
    buffers = _unsaved(model, tables)
    if not buffers:
        return {}, {}
    copies = {
        f"{_KEY}.{name}": value.detach().to("cpu", copy=True).contiguous()
        for name, value in buffers.items()
    }
    return {_KEY: {name: {"$tensor": f"{_KEY}.{name}"} for name in buffers}}, copies


def restore_unsaved_buffers(
    tree: Mapping[str, Any], model: nn.Module, tables: Sequence[Table]
) -> None:
    """Put back, in place, the buffers that :func:`copy_unsaved_buffers` copied.

    One that had another shape or type is put in the place of the live one.

    Args:
        tree: of a dense part.
    """
    if not (kept := tree.get(_KEY)):
        return
    for name, value in _unsaved(model, tables).items():
        if name in kept:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._buffers[leaf] = put_back(value, kept[name])


def _unsaved(model: nn.Module, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
    """Return the buffers by name; memory that a table or the state has is not among them."""
    known = {_place(v) for v in model.state_dict(keep_vars=True).values() if _is_tensor(v)}
    known |= {_place(values) for table in tables for values in table.arrays().values()}
    return {
        name: value
        for name, value in model.named_buffers()
        if value.numel() and value.layout == torch.strided and _place(value) not in known
    }


def _is_tensor(value: object) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _place(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
