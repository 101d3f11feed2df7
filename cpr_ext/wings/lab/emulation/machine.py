"""On what, and with what, results were made."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import torch

import cpr_ext

# What decides a measurement; results are written while later ones are still being made.
_SOURCES = {".py", ".cpp", ".cu", ".h"}
_MEASURED = (":/csrc", ":/cpr_ext", ":/bench", ":(top,exclude)bench/results")


def describe_machine() -> dict[str, Any]:
    """Return machine, versions and, in a git checkout, the commit; JSON values."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpr_ext": cpr_ext.__version__,
        "commit": _git("rev-parse", "--short", "HEAD") or None,
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *_MEASURED)),
        "code": " ".join(f"{folder}:{digest}" for folder, digest in code_digests().items()),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": round(available_memory_bytes() / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def code_digests() -> dict[str, str]:
    """Return a digest of the sources in each folder of the package and, in a checkout, of csrc."""
    package = Path(__file__).resolve().parents[3]
    places = (*package.iterdir(), *(package / "wings").iterdir(), package.parent / "csrc")
    folders = [place for place in places if place.is_dir() and place.name != "wings"]
    digests = {folder.name: _digest_of(folder) for folder in sorted(folders)}
    return {name: digest for name, digest in digests.items() if digest}


def _digest_of(folder: Path) -> str:
    """Return 12 hex digits of the SHA-256 of names and contents; empty without sources."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12] if files else ""


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
    package = Path(__file__).resolve().parents[3]
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
