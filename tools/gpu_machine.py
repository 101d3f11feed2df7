"""What a machine has of what the parts of ``tools/gpu.py`` need, and the remedy for what it lacks.

Nothing is installed and nothing is changed here. The interpreter that is to be used is asked in a
process of its own, so that this file needs neither torch nor the packages that it looks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Where CUDA's installers put the toolkit, beside links such as ``cuda``.
INSTALLED = Path("/usr/local")
_PACKAGES = {
    "sklearn": "scikit-learn",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
}
_REMEDIES = {
    "nvcc": "install the CUDA toolkit, or set CUDA_HOME to its folder or CUDACXX to nvcc",
    "compute-sanitizer": "install it with the CUDA toolkit, or set CUDA_HOME to its folder",
}

_ASK = """
import importlib.util, json, pathlib, sys, sysconfig
folder = sysconfig.get_paths()["include"]
told = {
    "python": sys.version.split()[0],
    "include": folder,
    "has_header": pathlib.Path(folder, "Python.h").is_file(),
    "missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
}
try:
    import torch
    told["torch"], told["has_gpu"] = torch.__version__, torch.cuda.is_available()
    if told["has_gpu"]:
        told["gpu"] = torch.cuda.get_device_name(0)
        told["architecture"] = "%d.%d" % torch.cuda.get_device_capability(0)
except ImportError as error:
    told["torch"], told["has_gpu"] = f"none: {error}", False
print(json.dumps(told))
"""


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        python: the interpreter.
        about: what the interpreter told: its version, torch, the GPU, missing modules.
        tools: programs by name, of those that were found.
    """

    python: str
    about: Mapping[str, Any]
    tools: Mapping[str, Path]

    @property
    def has_gpu(self) -> bool:
        """Whether PyTorch can use a GPU here."""
        return bool(self.about["has_gpu"])

    def lacks(self, tools: Collection[str], modules: Collection[str], *, header: bool) -> str:
        """What is missing, with the remedy; empty: nothing."""
        said = [
            f"{name} was found neither on the PATH nor under {INSTALLED}/cuda*: {_REMEDIES[name]}"
            for name in tools
            if name not in self.tools
        ]
        if header and not self.about["has_header"]:
            said.append(
                f"Python.h is not in {self.about['include']}: install the headers of "
                f"Python {self.about['python']} (python3-dev or python3-devel)"
            )
        absent = [name for name in modules if name in self.about["missing"]]
        if absent:
            names = " ".join(_PACKAGES.get(name, name) for name in absent)
            said.append(f"no module {', '.join(absent)}: {self.python} -m pip install {names}")
        return "; ".join(said)

    def environment(self) -> dict[str, str]:
        """Variables with which a build finds nvcc, and compiles for the GPU that is here alone."""
        found: dict[str, str] = {}
        if "nvcc" in self.tools:
            found["CUDACXX"] = os.environ.get("CUDACXX") or str(self.tools["nvcc"])
        folders = [str(path.parent) for path in self.tools.values()]
        found["PATH"] = os.pathsep.join([*dict.fromkeys(folders), os.environ.get("PATH", "")])
        if "TORCH_CUDA_ARCH_LIST" not in os.environ and "architecture" in self.about:
            found["TORCH_CUDA_ARCH_LIST"] = self.about["architecture"]
        return found


def find_tool(name: str, environment: Mapping[str, str]) -> Path | None:
    """A program of the CUDA toolkit: on the PATH, in a named folder, or where it usually is."""
    compiler = environment.get("CUDACXX")
    if name == "nvcc" and compiler and (found := shutil.which(compiler)):
        return Path(found)
    named = [environment[home] for home in ("CUDA_HOME", "CUDA_PATH") if environment.get(home)]
    usual = [INSTALLED / "cuda", *sorted(INSTALLED.glob("cuda-*"), key=_version, reverse=True)]
    homes = [str(Path(home) / "bin") for home in (*named, *usual)]
    places = os.pathsep.join([environment.get("PATH", ""), *homes])
    found = shutil.which(name, path=places)
    return Path(found) if found else None


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def examine(python: str, modules: Collection[str]) -> Machine:
    """Ask the interpreter for these modules, and look for the tools.

    Raises:
        OSError: the interpreter cannot be run.
        RuntimeError: it ends with an error.
    """
    done = subprocess.run([python, "-c", _ASK, *modules], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{python} ended with exit status {done.returncode}: {done.stderr}")
    tools = {name: find_tool(name, os.environ) for name in _REMEDIES}
    return Machine(
        python,
        json.loads(done.stdout.splitlines()[-1]),
        {name: path for name, path in tools.items() if path is not None},
    )
