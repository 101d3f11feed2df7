"""gpu_bounds.cu, compiled with the machine's nvcc: what the simplest kernels get from its GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import gpu_device
import torch

SOURCE = Path(__file__).with_suffix(".cu")
FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")


@cache
def library() -> ctypes.CDLL:
    """The functions, compiled for the GPU that is here."""
    major, minor = torch.cuda.get_device_capability()
    return compile_for(f"{major}{minor}")


def compile_for(architecture: str) -> ctypes.CDLL:
    """The functions, compiled by nvcc for an architecture such as ``90``."""
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    return compile_with([find_nvcc(), *FLAGS, code, str(SOURCE)])


def compile_with(command: Sequence[str]) -> ctypes.CDLL:
    """The functions, from the shared library that ``command -o FILE`` makes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu_bounds.so"
        done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} could not compile {SOURCE.name}:\n{done.stderr}")
        library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.bound_count.argtypes = [pointer, pointer, number, number, ctypes.c_int, pointer]
    library.bound_gather.argtypes = [pointer, pointer, pointer, number, number, pointer]
    return library


def find_nvcc() -> str:
    """CUDACXX, or nvcc on the PATH; tools/gpu.py sets both."""
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if found is None:
        raise RuntimeError("nvcc is needed to measure limits: put it on the PATH")
    return found


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the tensors lie, beside them; they must be kept alive by others."""
    places = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(places, dtype=torch.int64, device=tensors[0].device)


def count(
    counts: torch.Tensor, indices: torch.Tensor, lookups: int, *, returns: bool = False
) -> None:
    """Add 1 to each table of ``counts`` (int32) at each of its ``lookups`` ``indices`` (int64).

    Args:
        counts, indices: the tables' :func:`addresses`.
        returns: with additions that give the old value back.
    """
    _check(
        library().bound_count(
            counts.data_ptr(),
            indices.data_ptr(),
            len(counts),
            lookups,
            returns,
            gpu_device.stream(),
        )
    )


def gather(table: torch.Tensor, row_ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Pack rows ``row_ids`` of ``table`` into ``packed``, on the device; of n * 16 bytes each."""
    row_bytes = table.shape[1] * table.itemsize
    _check(
        library().bound_gather(
            table.data_ptr(),
            row_ids.data_ptr(),
            packed.data_ptr(),
            len(row_ids),
            row_bytes,
            gpu_device.stream(),
        )
    )


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the kernel of {SOURCE.name} was not launched: CUDA error {code}")
