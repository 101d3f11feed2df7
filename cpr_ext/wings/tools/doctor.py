"""Whether this machine and its packages fit: all checks, and the remedy for what is wrong."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import mmap
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

CheckStatus = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Check:
    """One thing that was examined.

    Attributes:
        name: what it is.
        status: ``ok``; ``note``: something optional is missing or slow; ``wrong``: the library
            cannot do its work.
        found: versions, speeds, names.
        remedy: what to do about it; empty if there is nothing to do.
    """

    name: str
    status: CheckStatus
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that was examined."""

    checks: Sequence[Check]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong; notes may remain."""
        return all(check.status != "wrong" for check in self.checks)


_BLOCK_BYTES = 4096


def check_disk(folder: Path) -> Check:
    """Check that a folder can be written, and past the page cache."""
    try:
        is_direct = _write_block(folder)
        status = os.statvfs(folder)
    except OSError as error:
        found = f"'{folder}' cannot be written: {error.strerror}"
        return Check("disk", "wrong", found, "name a folder for stores: cpr doctor FOLDER")
    place = f"'{folder}', {status.f_bavail * status.f_frsize / 1e9:.1f} GB free"
    if is_direct:
        return Check("disk", "ok", f"{place}; direct I/O")
    remedy = (
        "snapshots pass through the page cache, and push other data out of it; a local ext4 or "
        "xfs disk does better than tmpfs or NFS"
    )
    return Check("disk", "note", f"{place}; no direct I/O, the page cache", remedy)


def _write_block(folder: Path) -> bool:
    """Write a block durably in a file that is removed again; False: only by the page cache."""
    descriptor, name = tempfile.mkstemp(prefix="cpr_doctor.", dir=folder)
    os.close(descriptor)
    try:
        descriptor, is_direct = _open(name)
        try:
            os.write(descriptor, mmap.mmap(-1, _BLOCK_BYTES))  # aligned, as direct I/O needs it
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        Path(name).unlink()
    return is_direct


def _open(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(name, os.O_RDWR), False


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


_COMMANDS = ("click", "tqdm", "scipy")
_TRAINING = ("matplotlib", "pyarrow", "scikit-learn")
_METRICS = ("opentelemetry-sdk", "opentelemetry-exporter-prometheus")
_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
# The versions that the tests ran with.
TRIED_TORCHREC = "1.8.0"
TRIED_TORCH = "2.13"
_INSTALL = (
    f"pip install --no-deps torchrec=={TRIED_TORCHREC} fbgemm-gpu-cpu=={TRIED_TORCHREC} "
    f"'torch=={TRIED_TORCH}.*' && pip install 'cpr_ext[torchrec]'"
)


def check_commands() -> Check:
    """Check what every command but ``cpr train`` and ``emulate`` needs."""
    return _check_packages("commands", _COMMANDS, "cli", "cpr plan --failure-log needs scipy")


def check_training() -> Check:
    """Check what ``cpr train``, ``emulate`` and pictures need."""
    return _check_packages(
        "training", _TRAINING, "train", "cpr train, emulate and --plot need them"
    )


def check_remote() -> Check:
    """Check what ``Checkpointer(remote=...)`` and addresses of stores need."""
    return _check_packages(
        "object storage", ("obstore",), "remote", "copies in object storage need it"
    )


def check_metrics() -> Check:
    """Check what metrics for OpenTelemetry and Prometheus need."""
    return _check_packages("metrics", _METRICS, "opentelemetry", "export_metrics() needs them")


def _check_packages(name: str, packages: tuple[str, ...], extra: str, need: str) -> Check:
    found = {package: version_of(package) for package in packages}
    text = ", ".join(f"{package} {version}" for package, version in found.items() if version)
    missing = [package for package, version in found.items() if version is None]
    if not missing:
        return Check(name, "ok", text)
    text = f"missing: {', '.join(missing)}" + (f"; found: {text}" if text else "")
    return Check(name, "note", text, f"pip install 'cpr_ext[{extra}]' ({need})")


def check_live_recovery() -> Check:
    """Check that this torch has the private names with which workers meet again."""
    try:
        private = importlib.import_module("cpr_ext.distributed.collective.torch_private")
        private.require_known_torch()
    except Exception as error:  # also of a torch that lacks a whole module
        tried = "cpr launch needs a torch that was tried: 2.13.0 or 2.15.0"
        return Check("live recovery", "note", first_line(error), tried)
    return Check("live recovery", "ok", "cpr launch and Worker fit this torch")


def check_torchrec() -> Check:
    """Check that TorchRec, FBGEMM and torch fit each other, by importing them."""
    torchrec = version_of("torchrec")
    if torchrec is None:
        return Check("TorchRec", "ok", "not installed; only models of TorchRec need it")
    fbgemm = next((f"{name} {v}" for name in _FBGEMM if (v := version_of(name))), "no FBGEMM")
    torch = version_of("torch")
    found = f"torchrec {torchrec}, {fbgemm}, torch {torch}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fbgemm_gpu")
            importlib.import_module("torchrec.distributed")
    except Exception as error:  # a library of another torch: OSError, or anything at import
        text = f"{found}: cannot be imported: {first_line(error)}"
        return Check("TorchRec", "wrong", text, _INSTALL)
    is_tried = torchrec == TRIED_TORCHREC and str(torch).startswith(TRIED_TORCH)
    if not is_tried:
        remedy = f"tried: torchrec {TRIED_TORCHREC} with torch {TRIED_TORCH}"
        return Check("TorchRec", "note", found, remedy)
    return Check("TorchRec", "ok", found)


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


def diagnose(
    folder: str | os.PathLike[str] = ".",
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Examine this process's packages, this machine, and the disk of a folder.

    Args:
        folder: where stores are to be; a file is written there and removed.
        progress: called with the name of the next check.
    """
    checks: dict[str, Callable[[], Check]] = {
        "Python": check_python,
        "torch": check_torch,
        "cpr_ext": check_native,
        "CPU": check_cpu,
        "CUDA": check_cuda,
        "disk": lambda: check_disk(Path(folder)),
        "commands": check_commands,
        "training": check_training,
        "remote stores": check_remote,
        "metrics": check_metrics,
        "live recovery": check_live_recovery,
        "TorchRec": check_torchrec,
    }
    found = []
    for name, check in checks.items():
        progress(name)
        found.append(check())
    return Diagnosis(found)
