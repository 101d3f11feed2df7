"""Write a plain safetensors file block by block, without its tensors in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cpr_ext.errors import UsageError
from cpr_ext.state.dtypes import DTYPE_NAMES

# What a store holds as other dtypes of the same bits, too.
_NAMES = DTYPE_NAMES | {
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def write_safetensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    blocks_of: Callable[[str], Iterable[torch.Tensor]],
) -> None:
    """Write ``path`` and sync it.

    Args:
        specs: the tensors, by name.
        blocks_of: gives the elements of a tensor in order, as tensors of its dtype.

    Raises:
        UsageError: safetensors has no such dtype; nothing was written.
        OSError: the operating system refused.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    # Wide elements first, as safetensors itself does: then each tensor is aligned to its elements.
    names = sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name))
    offset = 0
    for name in names:
        end = offset + specs[name].size_bytes
        if (dtype := specs[name].dtype) not in _NAMES:
            raise UsageError(f"'{name}' is of {dtype}, which safetensors lacks: --format torch")
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": specs[name].shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            written = 0
            for block in blocks_of(name):
                data = block.detach().contiguous().reshape(-1).view(torch.uint8)
                file.write(data.numpy().data)
                written += data.numel()
            assert written == specs[name].size_bytes, f"{name}: {written} bytes"
        file.flush()
        os.fsync(file.fileno())
