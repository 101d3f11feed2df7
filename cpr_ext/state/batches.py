"""Batches of a data loader, and the generators that it draws them with."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, ValuesView
from typing import Any

import torch

from cpr_ext.errors import UsageError
from cpr_ext.state.dense_state import generator_states, restore_generators

_MOST_COMPARED = 1 << 16  # bytes of a batch


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the torch generators of a loader and its samplers, each once."""
    samplers = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = [loader, *samplers, getattr(samplers[1], "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def loader_states(loader: Any) -> dict[str, Any]:
    """Return the states of the global generators, and of those of a loader and its samplers."""
    own = [generator.get_state() for generator in _own_generators(loader)]
    return {"global": generator_states(), "own": own}


def set_back(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`loader_states` returned.

    Raises:
        UsageError: the loader has another number of them.
    """
    own = _own_generators(loader)
    if len(own) != len(states["own"]):
        raise UsageError(
            f"the loader and its samplers have {len(own)} torch generators, those that the store "
            f"was made with {len(states['own'])}. Give that loader"
        )
    restore_generators(states["global"])
    for generator, state in zip(own, states["own"], strict=True):
        generator.set_state(state)


def add_to_checksum(batch: Any, before: int) -> int:
    """Add a batch's first tensor to a checksum, if that is a dense one in the host's memory."""
    tensor = _first_tensor(batch)
    if tensor is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return before
    if tensor.is_nested:
        return before
    values = tensor.detach().reshape(-1)[: _MOST_COMPARED // tensor.itemsize]
    content = values.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return zlib.crc32(content.numpy().data, before)


def first_dimension(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in a batch; 1: there is none."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.dim() == 0 else tensor.size(0)


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    items = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(items, list | tuple | ValuesView):
        return None  # an array would be read element by element, an iterator used up
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
