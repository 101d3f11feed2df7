"""Builds faulty_io.c, the file operations that fail on demand; tests skip without a compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest


def library(directory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the fault injection with")
    built = directory / "faulty_io.so"
    source = Path(__file__).with_suffix(".c")
    command = [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(built), "-ldl"]
    subprocess.run(command, check=True)
    return built
