"""The CPU's kernels, and CUDA."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path
from typing import Any

from cpr_ext.wings.tools.doctor.check import Check

_BUILD_WITH_CUDA = "CPR_EXT_CUDA=ON pip install . where nvcc is found"


def check_cpu() -> Check:
    """Check which instruction set the kernels use, and how many cores there are."""
    cores = len(os.sched_getaffinity(0))
    native = _native()
    if native is None:
        return Check("CPU", "note", f"{cores} cores; kernels unknown", "see cpr_ext above")
    found = f"{cores} cores, kernels for {native.instruction_set()}"
    if platform.machine() == "x86_64" and "avx512" not in native.instruction_sets():
        return Check("CPU", "note", found, "a CPU with AVX-512 counts and selects rows faster")
    if cores == 1:
        remedy = "with a second core, snapshots are written while training runs"
        return Check("CPU", "note", found, remedy)
    return Check("CPU", "ok", found)


def check_cuda() -> Check:
    """Check whether tables on a GPU can be saved."""
    native = _native()
    try:
        torch = importlib.import_module("torch")
    except Exception:  # reported by the check of torch
        return Check("CUDA", "note", "unknown without torch", "see torch above")
    is_built = native is not None and native.has_cuda
    build = "cpr_ext built with CUDA" if is_built else "cpr_ext built without CUDA"
    if torch.version.cuda is None:
        found = f"torch {torch.__version__} has no CUDA; {build}"
        if _has_gpu():
            return Check("CUDA", "note", found, "for tables on the GPU: a torch with CUDA")
        return Check("CUDA", "ok", f"{found}; no GPU")
    if not torch.cuda.is_available():
        found = f"torch for CUDA {torch.version.cuda} finds no GPU; {build}"
        remedy = "install or update the NVIDIA driver" if _has_gpu() else ""
        return Check("CUDA", "note" if remedy else "ok", found, remedy)
    names = ", ".join(sorted({torch.cuda.get_device_name(n) for n in range(_count(torch))}))
    found = f"{_count(torch)} of {names}, torch for CUDA {torch.version.cuda}; {build}"
    if not is_built:
        return Check("CUDA", "note", found, f"for tables on a GPU: {_BUILD_WITH_CUDA}")
    assert native is not None
    if native.num_devices() != _count(torch):
        found += f", which finds {native.num_devices()}"
        return Check("CUDA", "wrong", found, "update the NVIDIA driver: it is older than the build")
    return Check("CUDA", "ok", found)


def _count(torch: Any) -> int:
    return int(torch.cuda.device_count())


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def _native() -> Any:
    try:
        return importlib.import_module("cpr_ext._native").native
    except ImportError:
        return None
