"""One file of a publication: tensors of one table, or those that are no table's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError
from cpr_ext.state.dtypes import DTYPES
from cpr_ext.storage.filesystem import read_whole
from cpr_ext.wings.publishing.row_batch import RowBatch
from cpr_ext.wings.publishing.safetensors_stream import TensorSpec, write_safetensors

FileFormat = Literal["safetensors", "parquet"]
ROW_ID = "row_id"
STEP = "step"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, durably.

    Raises:
        OSError: the operating system refused.
    """
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    write_safetensors(path, specs, lambda name: [tensors[name]])


def write_batches(path: Path, batches: list[RowBatch], file_format: FileFormat) -> None:
    """Write batches of one table as one file, durably.

    Raises:
        OSError: the operating system refused.
        ImportError: there is no pyarrow for Parquet.
    """
    if file_format == "parquet":
        _write_parquet(path, batches)
        return
    tensors = {ROW_ID: torch.cat([batch.row_ids for batch in batches])}
    for name in batches[0].arrays:
        tensors[name] = torch.cat([batch.arrays[name] for batch in batches])
    steps = [torch.full((len(b.row_ids),), b.step, dtype=torch.int64) for b in batches]
    write_tensors(path, tensors | {STEP: torch.cat(steps)})


def _write_parquet(path: Path, batches: list[RowBatch]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_batches([batch.to_arrow() for batch in batches])
    with path.open("wb") as file:
        # A dictionary would make one NaN of all.
        pq.write_table(table, file, compression="none", use_dictionary=False)
        file.flush()
        os.fsync(file.fileno())


def checksum_of(path: Path, size_bytes: int) -> int:
    """Return the CRC32C of a file of at most ``size_bytes``.

    Raises:
        DamageError: it is larger, or no regular file.
        OSError: it could not be read; FileNotFoundError: there is none.
    """
    return int(native.crc32c(read_whole(path, size_bytes)))


def read_tensors(data: bytes, name: str, num_rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of :func:`write_batches` or :func:`write_tensors`.

    Args:
        num_rows: of a file of batches; a compressed one may hold any number.

    Raises:
        DamageError: it is no such file.
    """
    try:
        if name.endswith(".parquet"):
            return _from_parquet(data, num_rows)
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


def _from_parquet(data: bytes, num_rows: int) -> dict[str, torch.Tensor]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file: Any = pq.ParquetFile(pa.BufferReader(data))
    if file.metadata.num_rows != num_rows:
        raise ValueError(f"it has {file.metadata.num_rows} rows, not {num_rows}")
    table: Any = file.read().combine_chunks()
    tensors = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        dtype = DTYPES[field.metadata[b"dtype"].decode()]
        row_shape = json.loads(field.metadata[b"shape"])
        chunk = column.combine_chunks()
        values = (chunk.flatten() if row_shape else chunk).to_numpy(zero_copy_only=False)
        tensor = torch.from_numpy(values.copy())
        tensor = tensor if dtype == torch.bool else tensor.view(dtype)
        tensors[field.name] = tensor.reshape(len(table), *row_shape)
    return tensors
