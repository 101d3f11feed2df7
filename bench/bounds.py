"""bounds.c, compiled with the machine's own compiler: what the simplest code gets from it."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-funroll-loops", "-shared", "-fPIC", "-pthread")


@cache
def _library() -> ctypes.CDLL:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bounds.so"
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    moves = [pointer, pointer, pointer, number, number, ctypes.c_int]
    library.bound_gather.argtypes = [*moves, ctypes.c_int]
    library.bound_gather.restype = None
    library.bound_scatter.argtypes = moves
    library.bound_scatter.restype = None
    library.bound_count.argtypes = [pointer, pointer, number, number]
    library.bound_count.restype = None
    library.bound_read.argtypes = [pointer, number]
    library.bound_read.restype = ctypes.c_uint64
    return library


def gather(
    table: torch.Tensor,
    row_ids: torch.Tensor,
    packed: torch.Tensor,
    threads: int,
    *,
    streams: bool = False,
) -> None:
    """Pack rows ``row_ids`` of ``table`` into ``packed``; rows of a multiple of 64 bytes.

    Args:
        streams: stores go past the caches.
    """
    _library().bound_gather(
        table.data_ptr(),
        row_ids.data_ptr(),
        packed.data_ptr(),
        len(row_ids),
        table.shape[1] * table.itemsize,
        threads,
        streams,
    )


def scatter(packed: torch.Tensor, row_ids: torch.Tensor, table: torch.Tensor, threads: int) -> None:
    """Write ``packed`` to the rows ``row_ids``, each there once, of ``table``."""
    _library().bound_scatter(
        packed.data_ptr(),
        row_ids.data_ptr(),
        table.data_ptr(),
        len(row_ids),
        table.shape[1] * table.itemsize,
        threads,
    )


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where the tensors lie, for :func:`count`; they must be kept alive by others."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def count(
    counts: ctypes.Array[ctypes.c_void_p],
    indices: ctypes.Array[ctypes.c_void_p],
    lookups: int,
) -> None:
    """Add 1 to each table of ``counts`` (int32) at each of its ``lookups`` ``indices`` (int64)."""
    _library().bound_count(counts, indices, len(counts), lookups)


def read(array: np.ndarray) -> None:
    """Read a contiguous array once, on one thread."""
    _library().bound_read(array.ctypes.data, array.nbytes // 8)
