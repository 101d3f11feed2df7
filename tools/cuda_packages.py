"""CUDA's compiler from the package index, for machines without one, such as GitHub's runners."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What nvcc needs to compile, and what is linked: its runtime, as a static library.
PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-nvvm",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-cuda-culibos",
)


def install(version: str, folder: Path) -> Path:
    """Install CUDA of a version, such as 13.0, in a folder; return its CUDA_HOME."""
    home = folder / "nvidia" / f"cu{version.split('.')[0]}"
    if not (home / "bin" / "nvcc").exists():
        command = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--target"]
        command += [str(folder), *(f"{name}=={version}.*" for name in PACKAGES)]
        subprocess.run(command, check=True)
        (home / "lib64").symlink_to("lib")  # where nvcc looks
        name_runtime(home / "lib")
    return home


def name_runtime(folder: Path) -> None:
    """Give the runtime the name by which CMake looks for it; only the static one is linked."""
    (library,) = folder.glob("libcudart.so.*")
    (folder / "libcudart.so").symlink_to(library.name)
