"""Whether this machine and its packages fit: all checks, and the remedy for what is wrong."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Check:
    """One thing that was examined.

    Attributes:
        name: what it is.
        status: ``ok``; ``note``: something optional is missing or slow; ``wrong``: the library
            cannot do its work.
        found: versions, names.
        remedy: what to do about it; empty if there is nothing to do.
    """

    name: str
    status: Literal["ok", "note", "wrong"]
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


# The versions that the tests ran with.
TRIED_TORCHREC = "1.8.0"
TRIED_TORCH = "2.13"
_INSTALL_TORCHREC = (
    f"pip install --no-deps torchrec=={TRIED_TORCHREC} fbgemm-gpu-cpu=={TRIED_TORCHREC} "
    f"'torch=={TRIED_TORCH}.*' && pip install 'cpr_ext[torchrec]'"
)
#: Extra -> its packages, and what needs them.
EXTRAS = {
    "cli": (("click", "tqdm", "scipy"), "cpr plan --failure-log needs scipy"),
    "train": (
        ("matplotlib", "pyarrow", "scikit-learn"),
        "cpr train, emulate and --plot need them",
    ),
    "remote": (("obstore",), "copies in object storage need it"),
    "opentelemetry": (
        ("opentelemetry-sdk", "opentelemetry-exporter-prometheus"),
        "export_metrics() needs them",
    ),
}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def diagnose(folder: str | os.PathLike[str] = ".") -> Diagnosis:
    """Examine this process's packages, this machine, and the disk of a folder.

    Args:
        folder: where stores are to be; a file is written there and removed.
    """
    here = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    checks: list[Callable[[], Check]] = [
        lambda: Check("Python", "ok", f"{here}, {len(os.sched_getaffinity(0))} cores"),
        check_torch,
        check_native,
        check_cuda,
        lambda: check_disk(Path(folder)),
        *(lambda extra=extra: check_extra(extra) for extra in EXTRAS),
        check_live_recovery,
        check_torchrec,
    ]
    return Diagnosis([check() for check in checks])


def check_torch() -> Check:
    """Check that torch loads."""
    try:
        return Check("torch", "ok", str(importlib.import_module("torch").__version__))
    except Exception as error:  # a missing library, a half-installed package
        found = f"torch cannot be imported: {first_line(error)}"
        return Check("torch", "wrong", found, "pip install 'torch>=2.4'")


def check_native() -> Check:
    """Check that the native core loads, and that it is of this version."""
    version = importlib.import_module("cpr_ext").__version__
    try:
        native = importlib.import_module("cpr_ext._native").native
    except ImportError as error:
        remedy = (
            "run `pip install .` in the source directory with this interpreter, and run elsewhere "
            "than there"
        )
        return Check("cpr_ext", "wrong", f"{version}; {first_line(error)}", remedy)
    found = f"{version}, native core {native.__file__}, for {native.instruction_set()}"
    installed = version_of("cpr_ext")
    if installed not in (None, version):
        found += f"; pip says {installed}"
        return Check("cpr_ext", "note", found, "two versions are installed: reinstall one of them")
    return Check("cpr_ext", "ok", found)


def check_cuda() -> Check:
    """Check whether tables on a GPU can be saved."""
    try:
        torch: Any = importlib.import_module("torch")
        native: Any = importlib.import_module("cpr_ext._native").native
    except Exception:
        return Check("CUDA", "note", "unknown", "see above")
    built = "with" if native.has_cuda else "without"
    found = f"torch for CUDA {torch.version.cuda}, cpr_ext built {built} it"
    if not torch.cuda.is_available():
        if not Path("/dev/nvidia0").exists():
            return Check("CUDA", "ok", f"{found}; no GPU")
        remedy = "use a torch with CUDA, and its NVIDIA driver"
        return Check("CUDA", "note", f"{found}; torch finds no GPU", remedy)
    devices = torch.cuda.device_count()
    found += f"; {devices} of {torch.cuda.get_device_name(0)}"
    if not native.has_cuda:
        remedy = "for tables on a GPU: CPR_EXT_CUDA=ON pip install . where nvcc is found"
        return Check("CUDA", "note", found, remedy)
    if native.num_devices() != devices:
        found += f", of which cpr_ext finds {native.num_devices()}"
        return Check("CUDA", "wrong", found, "update the NVIDIA driver: it is older than the build")
    return Check("CUDA", "ok", found)


def check_disk(folder: Path) -> Check:
    """Check that a folder can be written, and past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(prefix="cpr_doctor.", dir=folder) as file:
            file.write(b"a block")
            os.fsync(file.fileno())
            free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
            place = f"'{folder}', {free_bytes / 1e9:.1f} GB free"
            try:
                os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                remedy = (
                    "snapshots pass through the page cache, and push other data out of it; a local "
                    "ext4 or xfs disk does better than tmpfs or NFS"
                )
                return Check("disk", "note", f"{place}; no direct I/O, the page cache", remedy)
    except OSError as error:
        found = f"'{folder}' cannot be written: {error.strerror}"
        return Check("disk", "wrong", found, "name a folder for stores: cpr doctor FOLDER")
    return Check("disk", "ok", f"{place}; direct I/O")


def check_extra(extra: str) -> Check:
    """Check the packages of an extra."""
    packages, need = EXTRAS[extra]
    found = {package: version_of(package) for package in packages}
    text = ", ".join(f"{package} {version}" for package, version in found.items() if version)
    missing = [package for package, version in found.items() if version is None]
    if not missing:
        return Check(extra, "ok", text)
    text = f"missing: {', '.join(missing)}" + (f"; found: {text}" if text else "")
    return Check(extra, "note", text, f"pip install 'cpr_ext[{extra}]' ({need})")


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
    torchrec, torch = version_of("torchrec"), version_of("torch")
    if torchrec is None:
        return Check("TorchRec", "ok", "not installed; only models of TorchRec need it")
    found = f"torchrec {torchrec}, torch {torch}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fbgemm_gpu")
            importlib.import_module("torchrec.distributed")
    except Exception as error:  # a library of another torch: OSError, or anything at import
        text = f"{found}: cannot be imported: {first_line(error)}"
        return Check("TorchRec", "wrong", text, _INSTALL_TORCHREC)
    if torchrec != TRIED_TORCHREC or not str(torch).startswith(TRIED_TORCH):
        remedy = f"tried: torchrec {TRIED_TORCHREC} with torch {TRIED_TORCH}"
        return Check("TorchRec", "note", found, remedy)
    return Check("TorchRec", "ok", found)
