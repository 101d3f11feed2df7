"""Python, torch, and this library with its native core."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys

from cpr_ext.wings.tools.doctor.check import Check

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 4)
_TORCH_WITH_EXCHANGE_API = (2, 10)


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of ``2.13.0+cpu``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_python() -> Check:
    """Check the interpreter and the system."""
    system = f"{platform.system()} {platform.machine()}"
    found = f"{platform.python_version()} on {system}"
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", "wrong", found, "use Python 3.10 or newer")
    if platform.system() != "Linux" or sys.byteorder != "little":
        return Check("Python", "wrong", found, "use Linux on a little-endian CPU")
    if platform.machine() != "x86_64":
        remedy = "on other CPUs than x86-64 portable code runs, whose speed was not measured"
        return Check("Python", "note", found, remedy)
    return Check("Python", "ok", found)


def check_torch() -> Check:
    """Check that torch loads and is new enough."""
    try:
        version = str(importlib.import_module("torch").__version__)
    except Exception as error:  # a missing library, a half-installed package
        found = f"torch cannot be imported: {first_line(error)}"
        return Check("torch", "wrong", found, "pip install 'torch>=2.4'")
    if numbers(version) < OLDEST_TORCH:
        return Check("torch", "wrong", version, "pip install --upgrade 'torch>=2.4'")
    if numbers(version) < _TORCH_WITH_EXCHANGE_API:
        remedy = "torch 2.10 or newer hands row ids over faster (DLPack's C exchange API)"
        return Check("torch", "note", version, remedy)
    return Check("torch", "ok", version)


def check_native() -> Check:
    """Check that the native core loads, and that it is of this version."""
    cpr_ext = importlib.import_module("cpr_ext")
    version = cpr_ext.__version__
    try:
        native = importlib.import_module("cpr_ext._native").native
    except ImportError as error:
        found = f"{version}; {first_line(error)}"
        remedy = (
            "run `pip install .` in the source directory with this interpreter, and run elsewhere "
            "than there"
        )
        return Check("cpr_ext", "wrong", found, remedy)
    found = f"{version}, native core {native.__file__}"
    installed = version_of("cpr_ext")
    if installed not in (None, version):
        found += f"; pip says {installed}"
        return Check("cpr_ext", "note", found, "two versions are installed: reinstall one of them")
    return Check("cpr_ext", "ok", found)
