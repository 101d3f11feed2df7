"""The project's own tools: mutants of Python and of kernels, wheels, notebooks."""

import importlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def tools():
    """They find each other by being in one folder."""
    sys.path.insert(0, str(ROOT / "tools"))
    yield
    sys.path.remove(str(ROOT / "tools"))


# --- mutants ---

MODULE = '''\
"""A module."""
def largest(values: list[int], start: int = 0) -> int:
    best = start
    for value in values:
        if value > best:
            best = value
    if best < 0:
        raise ValueError(f"{1 + 1}")
    return best
'''
TESTS = """\
from cpr_ext.room.module import largest
def test_largest(): assert largest([1, 3, 2]) == 3
def test_none(): assert largest([]) == 0
"""


def test_a_mutant_is_run_by_the_tests_that_reach_it(tmp_path):
    for name, text in (
        ("tools/mutate.py", (ROOT / "tools/mutate.py").read_text()),
        ("python_tests/reach.py", (ROOT / "python_tests/reach.py").read_text()),
        ("cpr_ext/__init__.py", ""),
        ("cpr_ext/room/__init__.py", ""),
        ("cpr_ext/room/module.py", MODULE),
        ("python_tests/room/test_module.py", TESTS),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    command = [sys.executable, "tools/mutate.py", "room", "--workers", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert "room: 6 of 8 killed; survivors:" in done.stdout, done.stdout
    of = json.loads((tmp_path / "build/mutants/room.json").read_text())["mutants"].values()
    assert {(m["what"], m["lines"][0], m["text"], len(m["killers"]), m["ran"]) for m in of} == {
        ("bound", 5, "(value >= best)", 0, 1),  # as good
        ("bound", 7, "(best <= 0)", 1, 2),
        ("condition", 5, "(not (value > best))", 1, 1),
        ("condition", 7, "(not (best < 0))", 2, 2),
        ("constant", 2, "1", 1, 2),
        ("constant", 7, "1", 1, 2),
        ("no error", 8, "pass", 0, 0),
        ("result", 9, "return None", 2, 2),
    }


KERNEL = """\
int host(int a) { return a + 1; }
__device__ T both(T a, T b) {
  // a < b in words
  return a < b ? a + b : a;  // a + b
}
__global__ void __launch_bounds__(256)
    some_kernel(const Things things, int n) {
  if (n == 0) return;
  __syncthreads();
  atomicAdd(things.sum, 1u);
}
void launch(int n) {
  if (n < 1) return;
}""".splitlines()


def test_every_place_on_the_device_is_changed_and_each_that_may_survive_has_a_reason():
    mutate = importlib.import_module("mutate_kernels")
    assert [(number, line.strip()) for number, line in mutate.mutants(KERNEL)] == [
        (3, "return a <= b ? a + b : a;  // a + b"),
        (3, "return a < b ? a - b : a;  // a + b"),
        (7, "if (n == 0) ;"),
        (7, "if (n != 0) return;"),
        (8, ";"),
        (9, ";"),
        (9, "atomicAdd(things.sum, 2u);"),
    ]
    harmless = json.loads((ROOT / "tools/harmless_mutants.json").read_text())
    number = 0
    for path in [*ROOT.glob("csrc/**/*.cu"), *ROOT.glob("csrc/**/cuda/*.h")]:
        file, source = str(path.relative_to(ROOT)), path.read_text().splitlines()
        found = {mutate.listed_name(source, *mutant) for mutant in mutate.mutants(source)}
        reasons = harmless.pop(file, {})
        assert reasons.keys() <= found
        assert all(reason.endswith(".") for reason in reasons.values())
        assert all((ROOT / tests).is_dir() for tests in mutate.tests_of(file))
        number += len(found)
    assert harmless == {}
    assert number > 100


# --- wheels ---


@pytest.mark.parametrize(
    ("tags", "module", "machine", "is_whole"),
    [
        ("cp310-cp310-manylinux_2_27_x86_64", "310-x86_64", 0x3E, True),
        ("cp314-cp314-manylinux_2_27_aarch64", "314-aarch64", 0xB7, True),
        ("cp311-cp311-manylinux_2_27_x86_64", "310-x86_64", 0x3E, False),
        ("cp310-cp310-manylinux_2_27_aarch64", "310-x86_64", 0x3E, False),
        ("cp310-cp310-manylinux_2_27_aarch64", "310-aarch64", 0x3E, False),
    ],
)
def test_a_wheel_holds_a_module_of_its_python_and_processor(
    tmp_path, tags, module, machine, is_whole
):
    wheels = importlib.import_module("wheels")
    path = tmp_path / f"cpr_ext-0.1.0-{tags}.whl"
    module = f"cpr_ext/_C.cpython-{module}-linux-gnu.so"
    with zipfile.ZipFile(path, "w") as archive:
        head = b"\x7fELF".ljust(18, b"\0") + machine.to_bytes(2, "little")
        archive.writestr(module, head + b"cudaLaunchKernel")
    wheels.require_portable(path)
    if is_whole:
        assert wheels.contents(path) == f"{module} 0.0 MB, with CUDA"
        return
    with pytest.raises(SystemExit, match="holds cpr_ext/_C"):
        wheels.contents(path)


@pytest.mark.parametrize("tag", ["manylinux_2_36_x86_64", "linux_x86_64"])
def test_a_wheel_for_new_machines_only_is_refused(tag):
    with pytest.raises(SystemExit, match=r"needs a glibc newer than 2\.35"):
        importlib.import_module("wheels").require_portable(
            Path(f"cpr_ext-0.1.0-cp311-cp311-{tag}.whl")
        )


# --- the notebook: its cells run (make test-site), and what it shows is one run's ---

NOTEBOOK = ROOT / "docs/notebooks/first_job.ipynb"


@pytest.mark.parametrize("is_run", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_notebook_shows_a_kill_a_resumption_and_a_plan(is_run, monkeypatch, tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    if is_run:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        for cell in notebook["cells"]:
            cell.pop("outputs", None)
        importlib.import_module("notebook_pages").run(notebook["cells"], NOTEBOOK.name)
        assert [*tmp_path.iterdir()]  # it works there
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    text = "\n".join("".join(output["text"]) for output in outputs)
    begins = re.findall(r"^begins after step (\d+)$", text, re.MULTILINE)
    (newest,) = re.findall(r"^newest snapshot: step (\d+), ", text, re.MULTILINE)
    assert begins == ["0", newest]
    for said in ("return code -9\n", "step 300: loss", "sound: True", "Recover partially and save"):
        assert said in text
