"""Buffers that ``state_dict()`` leaves out, as a worker's own part of the dense state.

Their owner says that nobody needs them later. A job that returns to an earlier step needs them: a
counter that the forward pass advances would end in other bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cpr_ext.state.table import Table

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
    with torch.no_grad():
        for name, value in _unsaved(model, tables).items():
            if (found := kept.get(name)) is None:
                continue
            if (found.shape, found.dtype) == (value.shape, value.dtype):
                value.copy_(found)
            else:
                path, _, leaf = name.rpartition(".")
                model.get_submodule(path)._buffers[leaf] = found.to(value.device, copy=True)


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
