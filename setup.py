"""Builds the native core with CMake and Ninja; all other metadata is in pyproject.toml.

Environment: CPR_EXT_CUDA=AUTO|ON|OFF (AUTO: on if nvcc is found), CUDA_HOME, TORCH_CUDA_ARCH_LIST,
MAX_JOBS, CMAKE_ARGS, CPR_EXT_SANITIZE=address|thread, CPR_EXT_WERROR=1, CPR_EXT_BUILD_DIR (kept
between builds for several Pythons), and CPR_EXT_EMULATED=1 for the module that runs the CUDA
sources on the CPU, for tests.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SANITIZE = os.environ.get("CPR_EXT_SANITIZE", "")
EMULATED = os.environ.get("CPR_EXT_EMULATED") == "1"
# What a kept build folder knows of the environment before.
OF_ANOTHER_PYTHON = ("-U*Python*", "-U*PYTHON*", "-Upybind11*", "-UCMAKE_MAKE_PROGRAM")


class CMakeBuild(build_ext):
    """Hands the one extension to CMake and leaves placing the result to setuptools."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace:  # pip would take a temporary folder, and compile all of it every time
            self.build_temp = str(ROOT / "build" / "inplace")
        # What does not know Python is compiled once, for wheels of several.
        self.build_temp = os.environ.get("CPR_EXT_BUILD_DIR", self.build_temp)

    def build_extension(self, ext: Extension) -> None:
        if ext.name != "cpr_ext._C":
            return  # CMake has made it beside that one
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            "-G",
            "Ninja",
            *OF_ANOTHER_PYTHON,
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output.parent}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_BUILD_TYPE={'RelWithDebInfo' if SANITIZE else 'Release'}",
            f"-DCPR_EXT_SANITIZE={SANITIZE}",
            f"-DCPR_EXT_CUDA={os.environ.get('CPR_EXT_CUDA', 'AUTO')}",
            f"-DCPR_EXT_EMULATED={'ON' if EMULATED else 'OFF'}",
            f"-DCPR_EXT_WERROR={'ON' if os.environ.get('CPR_EXT_WERROR') == '1' else 'OFF'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        build = ["cmake", "--build", str(build_dir)]
        if jobs := os.environ.get("MAX_JOBS"):
            build += ["--parallel", jobs]
        # cmake and ninja from PyPI lie beside the interpreter, even in a venv not activated.
        folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        if cuda_home := os.environ.get("CUDA_HOME"):
            folders.insert(1, str(Path(cuda_home) / "bin"))
        path = os.pathsep.join(folders)
        for command in (configure, build):
            subprocess.run(command, check=True, env={**os.environ, "PATH": path})


def described() -> str:
    """README.md for a page outside the checkout: relative links become their text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


modules = ["cpr_ext._C", *["cpr_ext._emulated"] * EMULATED]
setup(
    long_description=described(),
    long_description_content_type="text/markdown",
    ext_modules=[Extension(name, sources=[]) for name in modules],
    cmdclass={"build_ext": CMakeBuild},
)
