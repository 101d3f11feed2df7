"""tools/native_stub.py: cpr_ext/_C.pyi has the types of all that the native module has."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cpr_ext._native import native

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "native_stub.py"
STUB = ROOT / "cpr_ext" / "_C.pyi"
# Where Any says what it should: elements of any dtype, values of several types.
# The last: of tables, which the core does not know.
GENERIC = r"NDArray\[typing\.Any\]|dict\[str, typing\.Any\]|list\[typing\.Any\]"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_stub", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = node
    return found


def test_the_stub_is_up_to_date():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_names_all_that_the_built_module_has():
    stub = names_of(ast.parse(STUB.read_text()).body)
    public = {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}
    assert len(public) > 30
    assert sorted(public.keys() - stub.keys()) == []
    for name, member in public.items():
        if isinstance(member, type) and vars(member).get("__init__") is not object.__init__:
            methods = {method for method in vars(member) if not method.startswith("_")}
            assert sorted(methods - names_of(stub[name].body).keys()) == [], name


def test_the_stub_leaves_no_argument_and_no_result_untyped():
    untyped = re.sub(GENERIC, "Generic", STUB.read_text())
    assert "Any" not in untyped
    functions = [n for n in ast.walk(ast.parse(untyped)) if isinstance(n, ast.FunctionDef)]
    assert len(functions) > 80
    for function in functions:
        arguments = [*function.args.args, *function.args.kwonlyargs]
        assert function.returns is not None
        named = [each for each in arguments if each.arg != "self"]
        assert all(each.annotation is not None for each in named), function.name
        assert not any(re.fullmatch(r"arg\d+", each.arg) for each in named), function.name


def test_a_stub_that_differs_is_shown(tool, capsys):
    text = STUB.read_text()
    assert tool.compare(text, text) == 0
    assert tool.compare(text, text.replace("def crc32c(", "def crc32(")) == 1
    printed = capsys.readouterr()
    assert "-def crc32c(" in printed.out
    assert "+def crc32(" in printed.out
    assert "run make stub" in printed.err


def test_types_are_those_that_pybind11_accepts(tool):
    raw = '''
"""
A module.
"""
from __future__ import annotations
import os
import typing
def f(a: typing.SupportsInt | typing.SupportsIndex, b: A = None, *, c: int | None = None) -> None:
    """
    Do it.
    """
class A:
    def path(self, share: typing.SupportsFloat | typing.SupportsIndex) -> os.PathLike | str:
        """
        Return the path
        of a file.
        """
'''
    expected = '''\
"""A module."""

import os
import typing

def f(a: typing.SupportsIndex, b: A | None = None, *, c: int | None = None) -> None:
    """Do it."""

class A:
    def path(self, share: float) -> os.PathLike[str] | str:
        """Return the path
        of a file.
        """
'''
    assert tool.tidy(raw) == tool.HEAD + expected
    assert tool.tidy(tool.tidy(raw)) == tool.tidy(raw)
