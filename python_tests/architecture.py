"""The arrows that are allowed between rooms and modules, and a reader of those that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# room -> the rooms it may include, besides itself
CPP_ROOMS: dict[str, set[str]] = {
    "core": set(),
    "selection": {"core"},
    "tracking": {"core", "selection"},
    "staging": {"core"},
    "storage": {"core"},
    "pipeline": {"core", "staging", "storage"},
    "bindings": {"core", "selection", "tracking", "staging", "storage", "pipeline"},
    "testing": set(),
}
DEVICE_HEADER = "core/device.h"  # the one that knows CUDA
# For *.cu only.
DEVICE_HEADERS = (
    *(DEVICE_HEADER, "core/device_bits.h", "selection/device_rows.h", "selection/device_scores.h"),
    *("tracking/device_bitmap.h", "tracking/device_fault.h", "tracking/device_grid.h"),
    *(
        "tracking/device_lookups.h",
        "tracking/device_pending_rows.h",
        "tracking/device_row_change.h",
    ),
    *("tracking/device_row_list.h", "tracking/device_sample.h", "tracking/device_sum.h"),
    "tracking/device_taken_rows.h",
)
# CUDA's stand-in in tests, and who may know it.
EMULATOR = ("testing/emulated_cuda.h", "testing/broken_kernels.h")
EMULATOR_USERS = (DEVICE_HEADER, "bindings/bind_emulator.cpp")

# A module may import those of any line above its own, and the other parts of its own package.
PYTHON_LAYERS: list[set[str]] = [
    {"_C"},  # the compiled module; only _native imports it
    {"errors"},
    {"options", "log_text", "dtypes", "position", "file_names"},
    {"_native", "at_exit", "files", "forks", "reading"},
    {"signed_json", "devices", "locks", "leases", "committer", "job_stores"},
    {"segment", "manifest"},
    {"packing", "retention", "merge_plan", "metrics", "witness", "table_parts"},
    {"table_plans", "wrapper_names"},
    {"dense_tree"},
    {"tables", "segment_rows", "segment_stream", "segment_header", "row_updates"},
    {"abandoned_hooks", "table_versions", "slot_size", "unwatched"},
    {"recovery_report"},
    {"shard_rows", "aftermath"},
    {"tracking", "table_watch", "priorities", "schedules", "store"},
    {"selection", "dense", "store_reader", "target_pls", "run_costs"},
    {"segment_capture", "merging", "run_account", "row_samples"},
    {"snapshot", "recovery"},
    {"overlap", "transplant", "checking", "base_rule", "requested_snapshot"},
    {"regrouping"},
    {"compactor", "recovering"},
    {"saving"},
    {"checkpointer"},
    {"__init__"},
    {"maintenance"},
    {"distributed", "emulation"},
    {"integrations"},
    {"report"},
    {"cli"},
]
# Modules beside the layers: what each may import, besides itself.
PYTHON_ASIDE: dict[str, set[str]] = {
    "policy": {"errors"},
    "dlrm": {"errors"},
    # What trains and fails the reference model: the public names, also where they are defined.
    "dlrm.trainer": {
        *("errors", "dlrm", "__init__", "checkpointer", "policy", "priorities", "schedules"),
        *("saving", "tables", "metrics"),
    },
}
# What of the layers may use a module that lies aside: the schedule that plans.
PYTHON_ALSO: dict[str, set[str]] = {"target_pls": {"policy"}}
_TRAINER = ("trainer", "failures")
# Everything on top of the layers may use what lies aside.
TOP_LAYERS = ("distributed", "emulation", "integrations", "report", "cli", "__init__")

HOW_TO_ADD = (
    "it is not in python_tests/architecture.py: add it to PYTHON_LAYERS in the line above all "
    "modules that may import it (or to PYTHON_ASIDE), and to docs/architecture.md"
)

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cpp_faults(path: str, text: str) -> Iterator[str]:
    """What is wrong with the includes of csrc/`path`, one sentence each."""
    room = path.split("/")[0]
    if room not in CPP_ROOMS:
        yield f"csrc/{path}: room '{room}' is not in CPP_ROOMS: add it, and to csrc/README.md"
        return
    for bracket, header in _INCLUDE.findall(text):
        if header.startswith(("pybind11/", "Python.h")) and room != "bindings":
            yield f"csrc/{path} includes {header}; only bindings/ may know Python"
        if header.startswith(("torch/", "ATen/", "c10/")):
            yield f"csrc/{path} includes {header}; the core links no torch"
        is_cuda = header.startswith(("cuda", "cub/", "thrust/"))
        if is_cuda and not path.endswith(".cu") and path != DEVICE_HEADER:
            yield f"csrc/{path} includes {header}; CUDA belongs in *.cu and {DEVICE_HEADER}"
        if header in DEVICE_HEADERS and not path.endswith(".cu") and path not in DEVICE_HEADERS:
            yield f"csrc/{path} includes {header}; only *.cu may"
        if header in EMULATOR and path in EMULATOR_USERS:
            continue
        target = header.split("/")[0]
        if bracket == '"' and target != room and target not in CPP_ROOMS[room]:
            allowed = ", ".join(sorted(CPP_ROOMS[room])) or "nothing else"
            yield f"csrc/{path} includes {header}; {room}/ may include {allowed}"


def _modules() -> set[str]:
    return set().union(*PYTHON_LAYERS, PYTHON_ASIDE)


def module_of(path: str) -> str:
    """The name in the tables above that cpr_ext/`path` belongs to."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "dlrm" and len(parts) > 1 and parts[1].startswith(_TRAINER):
        return "dlrm.trainer"
    return parts[0]


def allowed_imports(module: str) -> set[str]:
    if module in PYTHON_ASIDE:
        return PYTHON_ASIDE[module]
    below: set[str] = set()
    if module == "_native":
        return {"_C", "errors"}
    for layer in PYTHON_LAYERS:
        if module in layer:
            break
        below |= layer - {"_C"}
    below |= PYTHON_ALSO.get(module, set())
    return below | (set(PYTHON_ASIDE) if module in TOP_LAYERS else set())


def _imported_paths(path: str, text: str) -> Iterator[str]:
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
            if len(base) > 1:
                # `from cpr_ext.dlrm import trainer` names a module of its own.
                for alias in node.names:
                    yield "/".join([*base[1:], alias.name])
                continue
            for alias in node.names:  # from cpr_ext import x: a module, or a public name
                yield alias.name if alias.name in _modules() else ""


def python_faults(path: str, text: str) -> Iterator[str]:
    """What is wrong with the imports of cpr_ext/`path`, one sentence each."""
    module = module_of(path)
    if module not in _modules():
        yield f"cpr_ext/{path}: {HOW_TO_ADD}"
        return
    for imported in _imported_paths(path, text):
        target = module_of(imported + ".py") if imported else "__init__"
        if module == "__init__" and target == "__init__":
            continue
        if target not in _modules():
            yield f"cpr_ext/{path} imports cpr_ext.{target}: {HOW_TO_ADD}"
        elif target != module and target not in allowed_imports(module):
            allowed = ", ".join(sorted(allowed_imports(module))) or "nothing of ours"
            yield f"cpr_ext/{path} imports {target}; {module} may import {allowed}"
