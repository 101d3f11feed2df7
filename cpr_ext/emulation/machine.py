"""On what, and with what, results were made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

# What decides a measurement; results are written while later ones are still being made.
_MEASURED = (":/csrc", ":/cpr_ext", ":/bench", ":(top,exclude)bench/results")


def describe_machine() -> dict[str, Any]:
    """Return machine, versions and, in a git checkout, the commit; JSON values."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpr_ext": importlib.metadata.version("cpr_ext"),
        "commit": _git("rev-parse", "--short", "HEAD") or None,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *_MEASURED)),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": round(available_memory_bytes() / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def available_cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory_bytes() -> int:
    """Return memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _git(*arguments: str) -> str:
    """Return git's facts about the checkout of this package; empty without one."""
    package = Path(__file__).resolve().parents[1]
    if not (package.parent / ".git").exists():
        return ""  # installed: a repository around it is another project's
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=package)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
