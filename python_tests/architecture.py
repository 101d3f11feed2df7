"""The arrows that are allowed between rooms, and a reader of those that exist.

A room of ``cpr_ext/`` is a folder, in ``wings/`` each folder there, or a module beside the folders;
a room of ``csrc/`` is a folder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# room -> the rooms it may include, besides itself
CPP_ROOMS: dict[str, set[str]] = {
    "core": set(),
    "selection": {"core"},
    "tracking": {"core", "selection"},
    "staging": {"core"},
    "storage": {"core"},
    "pipeline": {"core", "staging", "storage"},
    "parity": {"core", "staging"},
    "scrub": {"core", "staging", "tracking"},
    "bindings": {
        *("core", "selection", "tracking", "staging", "storage", "pipeline", "parity", "scrub")
    },
    "testing": set(),
}
CUDA_HEADER = "core/cuda/device.h"  # the one that knows CUDA
# The only file outside testing/ that includes testing/. The others get its cuda_runtime.h from the
# include path of their build.
EMULATOR_USER = "bindings/bind_emulator.cpp"
EMULATOR_MACRO = "CPR_EXT_EMULATED_DEVICE"  # known to these rooms only
ROOMS_WITH_MACRO = ("bindings", "testing")

# A room may import those of any line above its own.
PYTHON_ROOMS: list[set[str]] = [
    {"errors", "_native", "wings"},
    {"runtime"},
    {"state"},
    {"tracking", "storage"},
    {"recovery", "wings/cli", "wings/remote"},
    {"saving"},
    {"checkpointer", "wings/policy"},
    {"wings/proving", "distributed", "wings/publishing"},
    {"__init__"},
    {"integrations", "wings/callbacks", "wings/tools"},
    {"wings/lab"},
]
# Pure folders, which may import less, and the modules there that are not.
PURE: dict[str, set[str]] = {"wings/policy": {"errors"}, "wings/lab/dlrm": {"errors"}}
# Train and fail the reference model; a schedule that plans.
IMPURE = ("wings/lab/dlrm/trainer", "wings/lab/dlrm/failures", "wings/policy/target_pls")
# What the engine works without, and does not import.
WINGS = ("wings", "integrations")
ENGINE = {
    *("errors", "_native", "runtime", "state", "tracking", "storage", "recovery", "saving"),
    "checkpointer",
}
COMPILED = "_C"  # only _native imports it

HOW_TO_ADD = (
    "it is not in python_tests/architecture.py: add it to PYTHON_ROOMS in the line above all rooms "
    "that may import it, and to docs/architecture.md"
)

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def _includes(text: str) -> list[str]:
    return [header for bracket, header in _INCLUDE.findall(text) if bracket == '"']


def knows_cuda(header: str, seen: set[str] | None = None) -> bool:
    """Whether csrc/`header` is, or includes through others, the header that knows CUDA."""
    seen = set() if seen is None else seen
    if header == CUDA_HEADER:
        return True
    if header in seen or not (CSRC / header).is_file():
        return False
    seen.add(header)
    return any(knows_cuda(other, seen) for other in _includes((CSRC / header).read_text()))


def cpp_faults(path: str, text: str) -> Iterator[str]:
    """What is wrong with the includes of csrc/`path`, one sentence each."""
    room = path.split("/")[0]
    if room not in CPP_ROOMS:
        yield f"csrc/{path}: room '{room}' is not in CPP_ROOMS: add it, and to csrc/README.md"
        return
    is_cuda = "/cuda/" in path
    if path.endswith(".cu") and not is_cuda:
        yield f"csrc/{path}: CUDA sources belong in {room}/cuda/"
    for bracket, header in _INCLUDE.findall(text):
        if header.startswith(("pybind11/", "Python.h")) and room != "bindings":
            yield f"csrc/{path} includes {header}; only bindings/ may know Python"
        if header.startswith(("torch/", "ATen/", "c10/")):
            yield f"csrc/{path} includes {header}; the core links no torch"
        if header.startswith(("cuda", "cub/", "thrust/")) and not (
            path == CUDA_HEADER or path.endswith(".cu") or room == "testing"
        ):
            yield f"csrc/{path} includes {header}; CUDA belongs in *.cu and {CUDA_HEADER}"
        if bracket == '"' and not is_cuda and knows_cuda(header):
            yield f"csrc/{path} includes {header}, which knows CUDA; only files in cuda/ may"
        target = header.split("/")[0]
        if target == "testing" and path == EMULATOR_USER:
            continue
        is_ours = bracket == '"' or target in CPP_ROOMS
        if is_ours and target != room and target not in CPP_ROOMS[room]:
            allowed = ", ".join(sorted(CPP_ROOMS[room])) or "nothing else"
            yield f"csrc/{path} includes {header}; {room}/ may include {allowed}"
    if EMULATOR_MACRO in text and room not in ROOMS_WITH_MACRO:
        yield f"csrc/{path} names {EMULATOR_MACRO}; only {', '.join(ROOMS_WITH_MACRO)} may"


def python_rooms() -> set[str]:
    """All rooms of cpr_ext."""
    return set().union(*PYTHON_ROOMS)


def room_of(path: str) -> str:
    """The room that cpr_ext/`path` is in; in ``wings/`` each folder is one."""
    if path == "__main__.py":
        return "wings/cli"  # it is its door
    parts = Path(path).with_suffix("").parts
    return "/".join(parts[:2]) if parts[0] == "wings" and parts[1:2] != ("__init__",) else parts[0]


def pure_folder_of(path: str) -> str | None:
    """The folder of PURE that a pure module is in."""
    if path.startswith(IMPURE):
        return None
    return next((folder for folder in PURE if path.startswith(f"{folder}/")), None)


def is_of_a_wing(path: str) -> bool:
    """Whether cpr_ext/`path`, a file or what is imported, is part of a wing."""
    return any(f"{path}/".startswith(f"{wing}/") for wing in WINGS)


def allowed_imports(path: str) -> set[str]:
    """The rooms that cpr_ext/`path` may import, besides its own."""
    room = room_of(path)
    if pure := pure_folder_of(path):
        return PURE[pure]
    below: set[str] = {COMPILED} if room == "_native" else set()
    for line in PYTHON_ROOMS:
        if room in line:
            break
        below |= line
    return below


def imported_paths(path: str, text: str) -> Iterator[str]:
    """The parts of cpr_ext that a module imports, as paths below it ('' for the package)."""
    package = Path("cpr_ext", path).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "cpr_ext":
                    yield "/".join(alias.name.split(".")[1:])
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            if base[:1] != ["cpr_ext"]:
                continue
            for alias in node.names:
                if len(base) > 1:  # `from cpr_ext.wings.lab.dlrm import trainer` names a module
                    yield "/".join([*base[1:], alias.name])
                else:  # from cpr_ext import x: a room, or a public name
                    yield alias.name if alias.name in {*python_rooms(), COMPILED} else ""


def python_faults(path: str, text: str) -> Iterator[str]:
    """What is wrong with the imports of cpr_ext/`path`, one sentence each."""
    room = room_of(path)
    if room not in python_rooms():
        yield f"cpr_ext/{path}: {HOW_TO_ADD}"
        return
    allowed = allowed_imports(path)
    for imported in imported_paths(path, text):
        target = room_of(imported + ".py") if imported else "__init__"
        pure = pure_folder_of(path)
        if room in ENGINE and not is_of_a_wing(path) and is_of_a_wing(imported):
            yield f"cpr_ext/{path} imports {imported}; the engine imports no wing"
            continue
        if target == room and pure in (None, pure_folder_of(f"{imported}/")):
            continue
        if target not in {*python_rooms(), COMPILED}:
            yield f"cpr_ext/{path} imports cpr_ext.{target}: {HOW_TO_ADD}"
        elif target not in allowed:
            names = ", ".join(sorted(allowed)) or "nothing of ours"
            yield f"cpr_ext/{path} imports {imported or target}; {room} may import {names}"


def is_there(package: Path, imported: str) -> bool:
    """Whether the package has this module, or name of a module, given as a path below it."""
    for module in (package / imported, package / f"{imported}.py"):
        if module.exists():
            return True
    folder, _, name = imported.rpartition("/")
    for module in (package / folder / "__init__.py", package / f"{folder}.py"):
        if module.is_file() and name in _names_of(ast.parse(module.read_text())):
            return True
    return False


def _names_of(tree: ast.Module) -> set[str]:
    """What a module defines or imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def module_graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules it imports; both as paths below cpr_ext, of ``texts`` by path."""
    names = {path.removesuffix(".py").removesuffix("/__init__"): path for path in texts}
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        found = graph.setdefault(path, set())
        for imported in imported_paths(path, text):
            # What is imported is a module, or a name in one.
            target = names.get(imported) or names.get(imported.rpartition("/")[0])
            if target is not None and target != path and imported:
                found.add(target)
    return graph


def circle_of(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one found; empty: there is none."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if circle := walk(other, [*way, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := walk(node, []))), [])
