"""The public face: what can be imported, what it says of itself, and how fast it is there."""

import importlib
import re
from pathlib import Path

import pytest

import cpr_ext
from python_tests.helpers import run_python

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_can_be_imported_and_is_listed():
    assert list(cpr_ext.__all__) == sorted(cpr_ext.__all__)
    assert len(cpr_ext.__all__) <= 34
    for name in cpr_ext.__all__:
        assert getattr(cpr_ext, name).__name__ == name
        assert name in dir(cpr_ext)
    namespace = {}
    exec("from cpr_ext import *", namespace)
    assert set(cpr_ext.__all__) <= namespace.keys()


def classes_of_the_package() -> set[str]:
    texts = [path.read_text() for path in (ROOT / "cpr_ext").rglob("*.py")]
    return {name for text in texts for name in re.findall(r"^class ([A-Z]\w+)", text, re.M)}


def code_of_the_guide() -> str:
    text = (ROOT / "docs/guide.md").read_text()
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *spans])


def test_the_public_names_are_those_of_the_guide():
    named = set(re.findall(r"\b[A-Z]\w+", code_of_the_guide())) & classes_of_the_package()
    assert named == {name for name in cpr_ext.__all__ if name[0].isupper()}


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = cpr_ext.Chekpointer
    with pytest.raises(ImportError):
        exec("from cpr_ext import Chekpointer")


def test_a_name_of_another_module_is_named_with_its_place():
    with pytest.raises(
        AttributeError, match=r"no attribute 'Worker'; it is in cpr_ext\.distributed"
    ):
        _ = cpr_ext.Worker
    for name, place in cpr_ext._ELSEWHERE.items():
        if place.startswith(("integrations.", "wings.callbacks.")):
            assert (ROOT / "cpr_ext" / place.replace(".", "/")).is_dir()
        else:
            assert name in importlib.import_module(f"cpr_ext.{place}").__all__


@pytest.mark.parametrize("module", ["cpr_ext", "cpr_ext._native", "cpr_ext._C", "cpr_ext.errors"])
def test_importing_the_core_imports_neither_torch_nor_numpy(module):
    heavy = run_python(
        f"import sys, {module}; print([m for m in ('torch', 'numpy') if m in sys.modules])",
        is_new=True,
    )
    assert heavy == "[]\n"


def test_a_public_name_brings_its_module_when_it_is_asked_for():
    printed = run_python("import cpr_ext; print(cpr_ext.EverySteps(3))")
    assert printed == "EverySteps(steps=3, when_busy='delay')\n"
    code = "from cpr_ext import CprError; import sys; print('torch' in sys.modules)"
    assert run_python(code, is_new=True) == "False\n"
