"""The arrows between rooms: each is allowed by python_tests/architecture.py, or a test is red."""

from pathlib import Path

import pytest

from python_tests import architecture

ROOT = Path(__file__).resolve().parents[1]
CPP = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu"))
PYTHON = sorted((ROOT / "cpr_ext").rglob("*.py"))


def test_there_is_something_to_read():
    assert len(CPP) > 20
    assert len(PYTHON) > 2


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT / "csrc")) for path in CPP])
def test_a_native_file_includes_only_rooms_below_it(path):
    text = (ROOT / "csrc" / path).read_text()
    assert list(architecture.cpp_faults(path, text)) == []


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT / "cpr_ext")) for path in PYTHON])
def test_a_module_imports_only_modules_below_it(path):
    text = (ROOT / "cpr_ext" / path).read_text()
    assert list(architecture.python_faults(path, text)) == []


def test_the_map_names_every_room():
    text = (ROOT / "csrc" / "README.md").read_text()
    assert [room for room in architecture.CPP_ROOMS if f"`{room}/`" not in text] == []
    rooms = {path.relative_to(ROOT / "csrc").parts[0] for path in CPP}
    assert rooms <= set(architecture.CPP_ROOMS)


def test_every_native_source_is_listed_one_by_one_in_the_build():
    listed = (ROOT / "CMakeLists.txt").read_text()
    assert [path.name for path in CPP if path.suffix != ".h" and path.name not in listed] == []


@pytest.mark.parametrize(
    ("path", "line", "why"),
    [
        ("core/a.h", '#include "staging/row_array.h"', "core/ may include nothing else"),
        ("staging/a.cpp", '#include "storage/file.h"', "staging/ may include core"),
        ("storage/a.cpp", '#include "staging/slot_pool.h"', "storage/ may include core"),
        ("storage/a.cpp", '#  include "pipeline/segment_plan.h"', "storage/ may include core"),
        ("selection/a.cpp", '#include "tracking/row_tracker.h"', "selection/ may include core"),
        ("pipeline/a.cpp", '#include "bindings/tensor_view.h"', "pipeline/ may include"),
        ("pipeline/a.cpp", "#include <pybind11/pybind11.h>", "only bindings/"),
        ("staging/a.cpp", "#include <cuda_runtime.h>", "CUDA belongs in"),
        ("staging/device.h", "#include <cuda_runtime.h>", "CUDA belongs in"),
        ("staging/a.cpp", '#include "core/device.h"', "only *.cu may"),
        ("tracking/a.h", '#include "selection/device_rows.h"', "only *.cu may"),
        ("core/a.h", '#include "testing/emulated_cuda.h"', "core/ may include nothing else"),
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
        ("staging/a.cu", "#include <cuda_runtime.h>"),
        ("core/device.h", '#include <cuda_runtime.h>\n#include "testing/emulated_cuda.h"'),
        ("staging/a.cu", '#include "core/device.h"'),
        ("bindings/a.cpp", "#include <pybind11/numpy.h>"),
    ],
)
def test_an_allowed_include_is_not_caught(path, line):
    assert list(architecture.cpp_faults(path, line)) == []


@pytest.mark.parametrize(
    ("path", "line", "why"),
    [
        ("errors.py", "from cpr_ext._native import native", "errors may import nothing of ours"),
        ("tables.py", "from cpr_ext.snapshot import x", "tables may import"),
        ("tables.py", "from cpr_ext import checkpointer", "tables may import"),
        ("tables.py", "import cpr_ext.store", "tables may import"),
        ("tables.py", "import cpr_ext", "tables may import"),
        ("tables.py", "from . import store", "tables may import"),
        ("snapshot.py", "from .recovery import x", "snapshot may import"),
        ("store.py", "def f():\n    from cpr_ext.checkpointer import x", "store may import"),
        ("policy/plan.py", "from cpr_ext.schedules import x", "policy may import errors"),
        ("policy/plan.py", "from ..tables import x", "policy may import errors"),
        ("dlrm/model.py", "from cpr_ext.tables import x", "dlrm may import errors"),
        ("dlrm/model.py", "from cpr_ext.dlrm.trainer import x", "dlrm may import errors"),
        ("dlrm/model.py", "from cpr_ext.dlrm import trainer", "dlrm may import errors"),
        ("dlrm/trainer.py", "from cpr_ext.snapshot import x", "dlrm.trainer may import"),
        ("checkpointer.py", "from cpr_ext.policy import x", "checkpointer may import"),
        ("schedules.py", "from cpr_ext.policy import x", "schedules may import"),
        ("target_pls.py", "from cpr_ext.checkpointer import x", "target_pls may import"),
        ("report/a.py", "from cpr_ext.cli import x", "report may import"),
        ("tables.py", "from cpr_ext import _C", "tables may import"),
        ("tables.py", "import cpr_ext._C", "tables may import"),
        ("brand_new.py", "", "add it to PYTHON_LAYERS"),
        ("snapshot.py", "from cpr_ext.brand_new import x", "add it to PYTHON_LAYERS"),
    ],
)
def test_a_forbidden_import_is_caught(path, line, why):
    [fault] = architecture.python_faults(path, line)
    assert why in fault


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("_native.py", "from cpr_ext import _C as native"),
        ("snapshot.py", "from cpr_ext.errors import x\nfrom .tables import y\nimport torch"),
        ("policy/plan.py", "from cpr_ext.policy.pls import x\nfrom .pls import y"),
        ("dlrm/model.py", "from cpr_ext.dlrm.batch import x\nfrom cpr_ext.errors import y"),
        ("dlrm/trainer_loop.py", "from cpr_ext import Checkpointer\nfrom cpr_ext.dlrm import x"),
        ("__init__.py", "from cpr_ext.checkpointer import Checkpointer"),
        ("cli/main.py", "import cpr_ext\nfrom cpr_ext.policy import x"),
        ("report/a.py", "from cpr_ext.dlrm.trainer import x"),
        ("target_pls.py", "from cpr_ext.policy import x\nfrom cpr_ext.schedules import y"),
    ],
)
def test_an_allowed_import_is_not_caught(path, line):
    assert list(architecture.python_faults(path, line)) == []
