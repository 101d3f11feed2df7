"""The arrows between rooms: each is allowed by python_tests/architecture.py, or a test is red."""

import os
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import run

import pytest

from python_tests import architecture

ROOT = Path(__file__).resolve().parents[1]
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
PYTHON = sorted((ROOT / "cpr_ext").rglob("*.py"))


def rooms_of_the_tree() -> set[str]:
    return {architecture.room_of(str(path.relative_to(ROOT / "cpr_ext"))) for path in PYTHON}


def test_there_is_something_to_read():
    assert len(CPP) > 20
    assert len(PYTHON) > 100


def test_a_file_includes_and_imports_only_rooms_below_its_own():
    faults = []
    for path in CPP:
        faults += architecture.cpp_faults(str(path.relative_to(ROOT / "csrc")), path.read_text())
    for path in PYTHON:
        name = str(path.relative_to(ROOT / "cpr_ext"))
        faults += architecture.python_faults(name, path.read_text())
    assert faults == []


def test_no_modules_import_each_other_in_a_circle():
    texts = {str(path.relative_to(ROOT / "cpr_ext")): path.read_text() for path in PYTHON}
    graph = architecture.module_graph(texts)
    assert len([other for others in graph.values() for other in others]) > 300
    # The public face names modules that import it when they are asked for, not before.
    assert architecture.circle_of({path: graph[path] for path in graph if path != FACE}) == []


FACE = "__init__.py"


def test_the_rooms_are_those_of_the_tree():
    assert rooms_of_the_tree() == architecture.python_rooms()


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


def test_every_room_is_in_one_line_only():
    assert sum(map(len, architecture.PYTHON_ROOMS)) == len(architecture.python_rooms())


def test_the_map_names_every_room():
    text = (ROOT / "csrc" / "README.md").read_text()
    assert [room for room in architecture.CPP_ROOMS if f"`{room}/`" not in text] == []
    rooms = {path.relative_to(ROOT / "csrc").parts[0] for path in CPP}
    assert rooms <= set(architecture.CPP_ROOMS)


def test_the_map_names_every_room_of_the_package():
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = {
        f"`{room}/`" if (ROOT / "cpr_ext" / room).is_dir() else f"`{room}`"
        for room in rooms_of_the_tree() - {"__init__"}
    }
    assert [name for name in sorted(names) if name not in text] == []


def test_every_room_has_tests_of_its_name():
    tests = ROOT / "python_tests"
    missing = [
        room
        for room in sorted(rooms_of_the_tree() - {"__init__"})
        if not any((tests / room).glob("**/test_*.py"))
        and not (tests / f"test_{room.lstrip('_')}.py").is_file()
    ]
    assert missing == []


def test_every_folder_says_what_it_is_for():
    faces = [path for path in PYTHON if path.name == "__init__.py"]
    assert [str(path) for path in faces if not path.read_text().startswith('"""')] == []


def test_no_name_of_a_class_or_type_is_used_twice():
    places = defaultdict(list)
    for path in PYTHON:
        for name in architecture.type_names(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_of_types_are_found_wherever_they_are_defined():
    source = (
        "class A:\n    class _B: ...\n"
        "def f():\n    class C: ...\n"
        "Pair = tuple[int, int]\nT = TypeVar('T')\nKind: TypeAlias = str\n"
        "LIMIT = 3\nname = dict[str, int]\n"
    )
    assert sorted(architecture.type_names(source)) == ["A", "C", "Kind", "Pair", "_B"]


def test_every_native_source_is_listed_one_by_one_in_the_build():
    listed = (ROOT / "CMakeLists.txt").read_text().split()
    sources = [str(path.relative_to(ROOT)) for path in CPP if path.suffix != ".h"]
    assert [source for source in sources if source not in listed] == []


def test_no_class_name_is_used_twice_in_the_native_core():
    where: dict[str, list[str]] = {}
    for path in CPP:
        for name in architecture.defined_classes(path.read_text()):
            where.setdefault(name, []).append(str(path.relative_to(ROOT / "csrc")))
    assert len(where) > 80
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_classes_are_found_however_they_are_written():
    text = """
struct A {
class B : public C<D> {
  enum class E { kOne };
struct alignas(16) F {
struct B::G {
class H;
// class I { in words
struct J final : K {
template <class L>
struct M {
"""
    assert architecture.defined_classes(text) == ["A", "B", "E", "F", "B::G", "J", "M"]


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
    ("path", "line"),
    [
        ("tracking/a.cpp", '#include "selection/top_rows.h"'),
        ("pipeline/a.cpp", '#include "storage/file.h"\n#include "pipeline/segment_plan.h"'),
        ("staging/cuda/a.cu", "#include <cuda_runtime.h>"),
        ("core/cuda/device.h", "#include <cuda_runtime.h>"),
        ("testing/a.cpp", '#include <cuda_runtime.h>\n#include "testing/emulated_device.h"'),
        ("bindings/bind_emulator.cpp", '#include "testing/emulated_device.h"'),
        ("bindings/a.cpp", "#ifdef CPR_EXT_EMULATED_DEVICE"),
        ("bindings/a.cpp", '#include "tracking/cuda/access_counter.h"'),
    ],
)
def test_an_allowed_include_is_not_caught(path, line):
    assert list(architecture.cpp_faults(path, line)) == []


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


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("_native.py", "from cpr_ext import _C as native"),
        (
            "saving/snapshot.py",
            "from cpr_ext.errors import x\nfrom .selection import y\nimport torch",
        ),
        ("wings/policy/plan.py", "from cpr_ext.wings.policy.pls import x\nfrom .pls import y"),
        (
            "wings/lab/dlrm/model.py",
            "from cpr_ext.wings.lab.dlrm.batch import x\nfrom cpr_ext.errors import y",
        ),
        (
            "wings/lab/dlrm/trainer_loop.py",
            "from cpr_ext import Checkpointer\nfrom cpr_ext.wings.lab.dlrm import x",
        ),
        ("__init__.py", "from cpr_ext.checkpointer import Checkpointer"),
        ("wings/lab/report/a.py", "from cpr_ext.wings.lab.dlrm.trainer import x"),
        ("wings/policy/target_pls.py", "from cpr_ext.saving.schedules import x"),
    ],
)
def test_an_allowed_import_is_not_caught(path, line):
    assert list(architecture.python_faults(path, line)) == []


def test_a_circle_is_found_also_through_names_and_folders():
    texts = {
        "a/__init__.py": "",
        "a/one.py": "from cpr_ext.a.two import name",
        "a/two.py": "def f():\n    from cpr_ext.b import three",
        "b/three.py": "from cpr_ext.a import one",
    }
    circle = architecture.circle_of(architecture.module_graph(texts))
    assert circle == ["a/one.py", "a/two.py", "b/three.py", "a/one.py"]
    texts["b/three.py"] = "from cpr_ext.errors import x"
    assert architecture.circle_of(architecture.module_graph(texts)) == []


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


def test_a_name_that_is_not_there_is_found():
    package = ROOT / "cpr_ext"
    for there in (
        "state",
        "state/table",
        "state/table/Table",
        "wings/cli/output/size",
        "Checkpointer",
    ):
        assert architecture.is_there(package, there)
    for missing in (
        "states",
        "state/tables",
        "state/table/Tables",
        "wings/cli/output/format_bytes",
    ):
        assert not architecture.is_there(package, missing)
