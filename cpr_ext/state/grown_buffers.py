"""Buffers whose shape training changes: lists that grow, and observers that begin empty.

A snapshot names those that differ from what they were when the Checkpointer was made. A recovery
gives just these their saved shape. Any other difference is one of the model, which is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

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
