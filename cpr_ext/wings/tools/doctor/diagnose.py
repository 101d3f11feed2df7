"""All checks, in the order in which one thing needs the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cpr_ext.wings.tools.doctor import disk, packages, processors, software
from cpr_ext.wings.tools.doctor.check import Check, Diagnosis


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
        "Python": software.check_python,
        "torch": software.check_torch,
        "cpr_ext": software.check_native,
        "CPU": processors.check_cpu,
        "CUDA": processors.check_cuda,
        "disk": lambda: disk.check_disk(Path(folder)),
        "commands": packages.check_commands,
        "training": packages.check_training,
        "remote stores": packages.check_remote,
        "metrics": packages.check_metrics,
        "live recovery": packages.check_live_recovery,
        "TorchRec": packages.check_torchrec,
    }
    found = []
    for name, check in checks.items():
        progress(name)
        found.append(check())
    return Diagnosis(found)
