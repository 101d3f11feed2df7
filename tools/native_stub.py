"""Writes cpr_ext/_C.pyi, the types of the native module, from its bindings.

    python tools/native_stub.py [--check]

Reads cpr_ext._emulated (built with CPR_EXT_EMULATED=1), whose bindings are those of a build with
CUDA: so the stub is the same on every machine. --check writes nothing; it exits 1 and prints the
difference if the stub is not up to date.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import logging
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "cpr_ext" / "_C.pyi"
HEAD = "# Written by tools/native_stub.py from csrc/bindings/; do not edit.\n"
BUILD = "CPR_EXT_EMULATED=1 python setup.py build_ext --inplace"
#: Types as pybind11 writes them, and the types that it accepts.
TYPES = [
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "typing.SupportsIndex"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"os\.PathLike\b(?!\[)", "os.PathLike[str]"),
    # Its name depends on the version of Python; arrays of numpy are buffers since Python 3.12.
    (
        r"(?:collections\.abc|typing_extensions)\.Buffer(?! \|)",
        "typing_extensions.Buffer | numpy.typing.NDArray[typing.Any]",
    ),
]


def raw_stub() -> str:
    """Run pybind11-stubgen on the module, without its submodule for tests."""
    import pybind11_stubgen

    module = importlib.import_module("cpr_ext._emulated")
    del module.emulator
    # Signatures name torch.Tensor; the real torch need not be there.
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {"__module__": "torch"})  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        pybind11_stubgen.main(["--exit-code", "-o", folder, module.__name__])
        [written] = Path(folder).rglob("_emulated*.pyi")
        return written.read_text().replace(module.__name__, "cpr_ext._C")


def tidy(text: str) -> str:
    """Make the types such that mypy's strict mode accepts them, shorten docstrings, format."""
    for pattern, instead in TYPES:
        text = re.sub(pattern, instead, text)
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not _is_future(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            _allow_none(node.args)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            _shorten_docstring(node)
    return _format(HEAD + ast.unparse(tree) + "\n")


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _allow_none(arguments: ast.arguments) -> None:
    """Allow None where it is the default; pybind11 does not write that."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for argument, default in pairs:
        if not (isinstance(default, ast.Constant) and default.value is None):
            continue
        if argument.annotation is not None and "None" not in ast.unparse(argument.annotation):
            nothing = ast.Constant(None)
            argument.annotation = ast.BinOp(argument.annotation, ast.BitOr(), nothing)


def _shorten_docstring(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> None:
    text = ast.get_docstring(node)
    if text is None:
        return
    indent = "" if isinstance(node, ast.Module) else " " * (node.col_offset + 4)
    lines = [f"{indent}{line}" if line else "" for line in text.splitlines()]
    body = "\n".join(lines).strip()
    if len(lines) > 1:
        body += f"\n{indent}"
    node.body[0] = ast.Expr(ast.Constant(body))
    ast.fix_missing_locations(node)


def _format(text: str) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["check", "--quiet", "--fix-only", "--select", "I,F401,UP"]
    for arguments in (rules, ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *arguments, "--stdin-filename", str(STUB), "-"],
            cwd=ROOT,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"ruff {arguments[0]} failed:\n{done.stderr}")
        text = done.stdout
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    try:
        stub = tidy(raw_stub())
    except ImportError as error:
        print(f"{error}\nBuild it: {BUILD}; and install the extra `dev`", file=sys.stderr)
        return 1
    if not options.check:
        STUB.write_text(stub)
        return 0
    return compare(STUB.read_text(), stub)


def compare(old: str, new: str) -> int:
    """Print how two stubs differ; the exit status."""
    if old == new:
        return 0
    lines = (old.splitlines(True), new.splitlines(True))
    sys.stdout.writelines(difflib.unified_diff(*lines, "cpr_ext/_C.pyi", "the bindings"))
    print("cpr_ext/_C.pyi is not up to date: run make stub", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
