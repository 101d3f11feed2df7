"""Exchange of small facts and of the dense part over the process group.

JSON and raw bytes; nothing that a peer sends is executed.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from cpr_ext.state.dense_state import DensePart
from cpr_ext.state.dtypes import DTYPE_NAMES, DTYPES


def all_gather_json(group: dist.ProcessGroup, said: Any) -> list[Any]:
    """Gather a JSON value from every member; return the values by rank."""
    own = _to_bytes(said)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [_from_bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait for every member; raise at once if one is lost meanwhile."""
    group.allreduce([torch.zeros(1)]).wait()


def broadcast_part(group: dist.ProcessGroup, source: int, part: DensePart | None) -> DensePart:
    """Return the dense part of member ``source`` on every member.

    Args:
        part: needed of ``source`` only.
    """
    header, content = flatten(part) if part is not None else (torch.empty(0), torch.empty(0))
    sizes = torch.tensor([header.numel(), content.numel()])
    dist.broadcast(sizes, group=group, group_src=source)
    if part is None:
        header = torch.empty(int(sizes[0]), dtype=torch.uint8)
        content = torch.empty(int(sizes[1]), dtype=torch.uint8)
    for values in (header, content):
        if values.numel():
            dist.broadcast(values, group=group, group_src=source)
    return unflatten(header, content)


def flatten(part: DensePart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a header (JSON) and the concatenated tensors, both (n,) uint8."""
    described = [
        {"name": name, "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        for name, tensor in part.tensors.items()
    ]
    content = [
        tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in part.tensors.values()
    ]
    header = _to_bytes({"skeleton": part.skeleton, "tensors": described})
    return header, torch.cat(content) if content else torch.empty(0, dtype=torch.uint8)


def unflatten(header: torch.Tensor, content: torch.Tensor) -> DensePart:
    """Invert :func:`flatten`."""
    described = _from_bytes(header)
    tensors, begin = {}, 0
    for entry in described["tensors"]:
        value = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        flat = value.reshape(-1).view(torch.uint8)
        flat.copy_(content[begin : begin + flat.numel()])
        begin += flat.numel()
        tensors[entry["name"]] = value
    return DensePart(described["skeleton"], tensors)


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
