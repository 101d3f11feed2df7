"""Optional packages: those of the commands, of live recovery, and TorchRec."""

from __future__ import annotations

import importlib
import warnings

from cpr_ext.wings.tools.doctor.check import Check
from cpr_ext.wings.tools.doctor.software import first_line, version_of

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
