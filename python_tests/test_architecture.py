"""The arrows between rooms: each is allowed by python_tests/architecture.py, or a test is red."""

import os
import sys
from pathlib import Path
from subprocess import run

import pytest

from python_tests import architecture

ROOT = Path(__file__).resolve().parents[1]
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
PYTHON = sorted((ROOT / "cpr_ext").rglob("*.py"))


def test_a_file_includes_and_imports_only_rooms_below_its_own_and_none_in_a_circle():
    assert (len(CPP) > 20, len(PYTHON) > 100) == (True, True)
    faults = []
    for path in CPP:
        faults += architecture.cpp_faults(str(path.relative_to(ROOT / "csrc")), path.read_text())
    texts = {str(path.relative_to(ROOT / "cpr_ext")): path.read_text() for path in PYTHON}
    for name, text in texts.items():
        faults += architecture.python_faults(name, text)
    assert faults == []
    graph = architecture.module_graph(texts)
    assert len([other for others in graph.values() for other in others]) > 300
    # The public face names modules that import it when they are asked for, not before.
    assert architecture.circle_of({path: graph[path] for path in graph if path != FACE}) == []
    texts["errors.py"] = "from cpr_ext.state import table"  # which imports it
    assert architecture.circle_of(architecture.module_graph(texts)) != []


FACE = "__init__.py"


def test_the_rooms_are_those_of_the_tree():
    rooms = {architecture.room_of(str(path.relative_to(ROOT / "cpr_ext"))) for path in PYTHON}
    assert rooms == architecture.python_rooms()
    assert sum(map(len, architecture.PYTHON_ROOMS)) == len(rooms)
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in CPP} <= {*architecture.CPP_ROOMS}


def test_the_engine_has_few_rooms_and_arrows_between_them():
    """More need a reason: raise the numbers in the commit that gives it."""
    arrows = set()
    for path in PYTHON:
        name = str(path.relative_to(ROOT / "cpr_ext"))
        if architecture.is_of_a_wing(name):
            continue
        for imported in architecture.imported_paths(name, path.read_text()):
            target = architecture.room_of(f"{imported}.py") if imported else "__init__"
            arrows.add((architecture.room_of(name), target))
    between = {(a, b) for a, b in arrows if a != b and {a, b} <= architecture.ENGINE}
    assert len(architecture.ENGINE) <= 9
    assert len(between) <= 34, between


RESUMED = """
import torch
import cpr_ext

for steps in (3, 5):
    model = torch.nn.EmbeddingBag(1000, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(model, optimizer, "store") as ckpt:
        assert ckpt.recover().step in (0, 3)
        while ckpt.step_count < steps:
            optimizer.zero_grad()
            model(torch.randint(1000, (8, 2))).sum().backward()
            optimizer.step()
            ckpt.step(8)
assert cpr_ext.__file__.startswith(__import__("os").getcwd())
"""


def test_the_engine_works_without_the_folders_of_the_wings(tmp_path):
    (tmp_path / "cpr_ext").mkdir()
    for path in (ROOT / "cpr_ext").iterdir():
        if not architecture.is_of_a_wing(path.name):
            (tmp_path / "cpr_ext" / path.name).symlink_to(path)
    run([sys.executable, "-c", RESUMED], cwd=tmp_path, check=True, env=without_a_path())


def without_a_path():
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.parametrize(
    ("path", "line", "why"),
    [
        ("core/a.h", '#include "staging/row_array.h"', "core/ may include nothing else"),
        ("staging/a.cpp", '#include "storage/file.h"', "staging/ may include core"),
        ("pipeline/a.cpp", "#include <pybind11/pybind11.h>", "only bindings/"),
        ("staging/a.cpp", "#include <cuda_runtime.h>", "CUDA belongs in"),
        ("staging/a.cpp", '#include "core/cuda/device.h"', "which knows CUDA"),
        ("staging/a.cu", "", "CUDA sources belong in staging/cuda/"),
        ("core/cuda/device.h", "#include <testing/include/cuda_runtime.h>", "core/ may include"),
        ("core/cuda/device.cu", '#include "../testing/emulated_device.h"', "core/ may include"),
        ("core/cuda/device.h", "#ifdef CPR_EXT_EMULATED_DEVICE", "only bindings, testing may"),
        ("bindings/a.cpp", "#include <torch/extension.h>", "links no torch"),
        ("attic/a.cpp", "", "not in CPP_ROOMS"),
    ],
)
def test_a_forbidden_include_is_caught(path, line, why):
    [fault] = architecture.cpp_faults(path, f"// a comment\n{line}\n")
    assert why in fault


@pytest.mark.parametrize(
    ("path", "line", "why"),
    [
        ("errors.py", "from cpr_ext._native import native", "errors may import nothing of ours"),
        ("state/table.py", "from cpr_ext.saving.snapshot import x", "state may import"),
        ("state/table.py", "from cpr_ext import checkpointer", "state may import"),
        ("state/table.py", "import cpr_ext", "state may import"),
        ("state/table.py", "from ..storage import store", "state may import"),
        ("storage/store.py", "def f():\n    from cpr_ext.checkpointer import x", "storage may"),
        ("wings/policy/plan.py", "from cpr_ext.saving import x", "policy may import errors"),
        ("wings/lab/dlrm/model.py", "from cpr_ext.state.table import x", "lab may import errors"),
        (
            "wings/lab/dlrm/model.py",
            "from cpr_ext.wings.lab.dlrm import trainer",
            "lab may import errors",
        ),
        ("recovery/verify.py", "from cpr_ext.saving import x", "recovery may import"),
        ("wings/tools/a.py", "from cpr_ext.wings.lab.report import x", "tools may import"),
        ("storage/store.py", "from cpr_ext.wings.remote.head import x", "imports no wing"),
        ("storage/store.py", "from cpr_ext.wings import remote", "imports no wing"),
        ("state/table.py", "from cpr_ext import _C", "state may import"),
        ("state/table.py", "import cpr_ext._C", "state may import"),
        ("brand_new.py", "", "add it to PYTHON_ROOMS"),
        ("saving/snapshot.py", "from cpr_ext.brand_new import x", "add it to PYTHON_ROOMS"),
    ],
)
def test_a_forbidden_import_is_caught(path, line, why):
    [fault] = architecture.python_faults(path, line)
    assert why in fault


def test_what_a_script_imports_of_the_package_is_there():
    """Most of these run in no test: a name that moves must not wait for a user to miss it."""
    missing = []
    for path in (
        path for name in ("bench", "examples", "tools") for path in (ROOT / name).rglob("*.py")
    ):
        name = str(path.relative_to(ROOT))
        imported = set(architecture.imported_paths("../" + name, path.read_text()))
        imported -= {"", architecture.COMPILED}
        missing += [each for each in imported if not architecture.is_there(ROOT / "cpr_ext", each)]
    assert missing == []
