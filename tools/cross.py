"""A cross compiler for wheels of another processor: Debian's g++ for it, and nvcc on top.

Needs ARCH-linux-gnu-g++ (Debian: apt-get install g++-aarch64-linux-gnu). nvcc compiles for the
processor of its host compiler; the static runtime for it comes from the package
nvidia-cuda-runtime of CUDA 13. Headers of Python are those of this machine: its pyconfig.h fits, as
both are 64-bit Linux, and Python.h checks the sizes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cuda_packages import name_runtime


class Compiler:
    """What CMake and nvcc need to compile for a processor, in a folder for their files."""

    def __init__(self, arch: str, folder: Path) -> None:
        self.arch = arch
        self._name = f"{arch}-linux-gnu-g++"
        if shutil.which(self._name) is None:
            sys.exit(
                f"{self._name} is not installed (Debian: apt-get install g++-{arch}-linux-gnu)"
            )
        self._cuda = None
        if os.environ.get("CPR_EXT_CUDA") != "OFF" and (nvcc := find_nvcc()):
            self._cuda = make_toolkit(nvcc, arch, folder)

    def environment(self, python: str) -> dict[str, str]:
        """Return the variables with which setup.py compiles for an interpreter's version."""
        tag = subprocess.check_output(
            [python, "-c", "import sys; print('%d%d' % sys.version_info[:2])"], text=True
        ).strip()
        options = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.arch,
            "CMAKE_CXX_COMPILER": self._name,
            "PYTHON_MODULE_EXTENSION": f".cpython-{tag}-{self.arch}-linux-gnu.so",
            "PYTHON_MODULE_DEBUG_POSTFIX": "",
        }
        if self._cuda is None:
            return {"CMAKE_ARGS": as_arguments(options), "CPR_EXT_CUDA": "OFF"}
        options["CMAKE_CUDA_HOST_COMPILER"] = self._name
        return {
            "CMAKE_ARGS": as_arguments(options),
            "CPR_EXT_CUDA": "ON",
            "CUDA_HOME": str(self._cuda),
            "CUDACXX": str(self._cuda / "bin" / "nvcc"),
            "NVCC_CCBIN": self._name,  # also when CMake asks the compiler what it is
        }


def find_nvcc() -> str | None:
    """Return CUDA's compiler, the one that CMake will take."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def as_arguments(options: dict[str, str]) -> str:
    """Return CMake's command line for variables."""
    return " ".join(f"-D{name}={value}" for name, value in options.items())


def make_toolkit(nvcc: str, arch: str, folder: Path) -> Path:
    """Return a CUDA_HOME of this machine's compiler and the other processor's runtime."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lines = subprocess.run(
        [nvcc, "--dryrun", "-c", os.devnull, "-x", "cu"], capture_output=True, text=True
    ).stderr
    home = Path(re.search(r"^#\$ TOP=(.*)$", lines, re.MULTILINE)[1]).resolve()
    (folder / "bin").mkdir()
    for tool in (home / "bin").iterdir():
        if tool.name.startswith("nvcc"):  # it looks for the rest next to itself
            shutil.copy(tool, folder / "bin")
        else:
            (folder / "bin" / tool.name).symlink_to(tool)
    for name in ("nvvm", "include"):
        (folder / name).symlink_to(home / name)
    target = folder / "targets" / f"{arch}-linux"
    target.mkdir(parents=True)
    (target / "include").symlink_to(home / "include")
    (target / "lib").symlink_to(fetch_runtime(nvcc, arch, folder / "runtime"))
    for name in ("lib", "lib64"):
        (folder / name).symlink_to(target / "lib")
    return folder


def fetch_runtime(nvcc: str, arch: str, folder: Path) -> Path:
    """Return the folder of the other processor's CUDA runtime, of nvcc's version."""
    text = subprocess.check_output([nvcc, "--version"], text=True)
    version = re.search(r"release (\d+\.\d+)", text)[1]
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", folder]
    command += ["--only-binary=:all:"]
    command += [f"--platform=manylinux{glibc}_{arch}" for glibc in ("2014", "_2_17", "_2_27")]
    command += [f"nvidia-cuda-runtime=={version}.*"]
    subprocess.run(list(map(str, command)), check=True)
    (wheel,) = folder.glob("nvidia_cuda_runtime-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (library,) = folder.rglob("libcudart_static.a")
    name_runtime(library.parent)
    return library.parent
