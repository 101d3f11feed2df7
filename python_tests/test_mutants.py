"""tools/mutate_kernels.py: what it changes, and that it changes one place at a time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """\
int host(int a) { return a + 1; }

template <class T>
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


@pytest.fixture(scope="module")
def mutate():
    path = ROOT / "tools/mutate_kernels.py"
    spec = importlib.util.spec_from_file_location("mutate_kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_place_on_the_device_is_changed_and_none_on_the_host(mutate):
    assert [(number, line.strip()) for number, line in mutate.mutants(SOURCE)] == [
        (5, "return a <= b ? a + b : a;  // a + b"),
        (5, "return a < b ? a - b : a;  // a + b"),
        (10, "if (n == 0) ;"),
        (10, "if (n != 0) return;"),
        (11, ";"),
        (12, ";"),
        (12, "atomicAdd(things.sum, 2u);"),
    ]


def test_the_kernels_have_mutants_and_tests(mutate):
    paths = [*ROOT.glob("csrc/**/*.cu"), *ROOT.glob("csrc/**/cuda/*.h")]
    files = [path.relative_to(ROOT) for path in paths]
    found = {file: mutate.mutants((ROOT / file).read_text().splitlines()) for file in files}
    assert sum(map(len, found.values())) > 100
    for file in files:
        assert all((ROOT / tests).is_dir() for tests in mutate.tests_of(str(file)))


def test_each_mutant_that_may_survive_is_one_and_has_a_reason(mutate):
    harmless = json.loads((ROOT / "tools/harmless_mutants.json").read_text())
    for file, lines in harmless.items():
        source = (ROOT / file).read_text().splitlines()
        found = {mutate.listed_name(source, *mutant) for mutant in mutate.mutants(source)}
        assert set(lines) <= found
        assert all(reason.endswith(".") for reason in lines.values())


def test_a_verdict_is_kept_until_a_kernel_or_a_test_changes(mutate, tmp_path, monkeypatch):
    path = tmp_path / "verdicts.json"
    key = mutate.Verdicts.key("csrc/tracking/cuda/dirty_marks.cu", 3, "  return;")
    verdicts = mutate.Verdicts(path)
    assert verdicts.find(key) is None
    verdicts.note(key, "killed")
    assert mutate.Verdicts(path).find(key) == "killed"
    monkeypatch.setattr(mutate, "tests_of", lambda file: [])
    assert mutate.Verdicts.key("csrc/tracking/cuda/dirty_marks.cu", 3, "  return;") != key


def test_a_line_of_which_a_semicolon_is_left_has_the_lines_before_it_in_its_name(mutate):
    source = ["a();", "  b();", "  return;", "c();", "x < y;"]
    assert mutate.listed_name(source, 2, "  ;") == "a(); b(); ;"
    assert mutate.listed_name(source, 4, " x <= y;") == "x <= y;"
