"""One file of a publication: tensors of one table, or those that are no table's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError
from cpr_ext.state.dtypes import DTYPES
from cpr_ext.storage.filesystem import read_whole
from cpr_ext.wings.publishing.changed_rows import RowBatch
from cpr_ext.wings.publishing.safetensors_stream import TensorSpec, write_safetensors

ROW_ID = "row_id"
STEP = "step"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, durably.

    Raises:
        OSError: the operating system refused.
    """
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_safetensors(path, specs, lambda name: [tensors[name]])


def write_batches(path: Path, batches: list[RowBatch]) -> None:
    """Write batches of one table as one file, durably.

    Raises:
        OSError: the operating system refused.
    """
    tensors = {ROW_ID: torch.cat([batch.row_ids for batch in batches])}
    for name in batches[0].arrays:
        tensors[name] = torch.cat([batch.arrays[name] for batch in batches])
    steps = [torch.full((len(b.row_ids),), b.step, dtype=torch.int64) for b in batches]
    write_tensors(path, tensors | {STEP: torch.cat(steps)})


def checksum_of(path: Path, size_bytes: int) -> int:
    """Return the CRC32C of a file of at most ``size_bytes``.

    Raises:
        DamageError: it is larger, or no regular file.
        OSError: it could not be read; FileNotFoundError: there is none.
    """
    return int(native.crc32c(read_whole(path, size_bytes)))


def read_tensors(data: bytes, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of :func:`write_batches` or :func:`write_tensors`.

    Raises:
        DamageError: it is no such file.
    """
    try:
        return _from_safetensors(data)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise DamageError(f"{name}: not a file of a publication ({error!r:.200})") from error


def _from_safetensors(data: bytes) -> dict[str, torch.Tensor]:
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    tensors = {}
    for name, spec in header.items():
        if name != "__metadata__":
            begin, end = spec["data_offsets"]
            tensors[name] = _tensor(
                data, 8 + header_bytes + begin, end - begin, DTYPES[spec["dtype"]], spec["shape"]
            )
    return tensors


def _tensor(
    data: bytes, offset: int, size_bytes: int, dtype: torch.dtype, shape: list[int]
) -> torch.Tensor:
    count = math.prod(shape)
    if size_bytes != count * dtype.itemsize:
        raise ValueError(f"{size_bytes} bytes are not of shape {shape}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    # A copy: torch has no tensors that cannot be written to.
    values = torch.frombuffer(bytearray(data[offset : offset + size_bytes]), dtype=torch.uint8)
    return values.view(dtype).reshape(shape)
