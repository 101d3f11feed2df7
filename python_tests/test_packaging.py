"""What ``pip install .`` makes where there is neither torch nor nvcc; the choices of a build."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **options: object) -> str:
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def without_nvcc() -> str:
    """PATH without the folders that have a CUDA compiler."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(part for part in folders if not (Path(part) / "nvcc").exists())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which nothing was built, and where building disturbs nobody."""
    folder = tmp_path_factory.mktemp("source") / "cpr_ext"
    ignored = shutil.ignore_patterns(".*", "build", "demo_out", "*.so", "*.egg-info")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """The interpreter of a venv with nothing but this package, built by pip in isolation."""
    folder = tmp_path_factory.mktemp("packaging")
    # pip's isolated build environment has what pyproject.toml asks for: no torch.
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, source),
        # Nobody asks how fast it is.
        env={**os.environ, "PATH": without_nvcc(), "CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0"},
    )
    (wheel,) = folder.glob("cpr_ext-*.whl")
    environment = folder / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    return python


@pytest.mark.timeout(600)
def test_the_wheel_builds_without_torch_and_its_core_loads_without_it(bare_python: Path) -> None:
    program = (
        "import sys, cpr_ext._native as n\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(hex(n.native.crc32c(b'123456789')), n.native.__file__)"
    )
    checksum, extension = run(bare_python, "-c", program, cwd="/").split()
    assert checksum == "0xe3069283"
    linked = run("ldd", extension)
    assert "torch" not in linked
    assert "cuda" not in linked


def test_the_wheel_holds_the_data_that_the_package_reads(bare_python: Path) -> None:
    program = (
        "import importlib.resources as r\n"
        "print((r.files('cpr_ext') / 'wings/lab/dlrm/access_locality.json').is_file(),\n"
        "      (r.files('cpr_ext') / 'py.typed').is_file())"
    )
    assert run(bare_python, "-c", program, cwd="/").split() == ["True", "True"]


def test_the_page_of_the_package_links_to_nothing_that_it_lacks(bare_python: Path) -> None:
    program = "import importlib.metadata as m; print(m.metadata('cpr_ext').get_payload())"
    page = run(bare_python, "-c", program, cwd="/")
    assert "Checkpointing with Partial Recovery" in page
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []


def configure(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What CMake says to these options."""
    tools = Path(sys.executable).parent
    command = [
        *(tools / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *options),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
    ]
    env = {name: value for name, value in os.environ.items() if name != "CUDACXX"}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**env, **environment}
    )


def test_a_build_with_cuda_where_there_is_no_compiler_for_it_says_what_to_do(tmp_path):
    refused = configure(tmp_path / "on", "-DCPR_EXT_CUDA=ON", PATH=without_nvcc())
    assert refused.returncode != 0
    said = " ".join(refused.stderr.split())
    assert "CPR_EXT_CUDA is ON, but there is no CUDA compiler: put nvcc on the PATH" in said
    auto = configure(tmp_path / "auto", PATH=without_nvcc())
    assert auto.returncode == 0, auto.stderr
    assert "CUDA" not in (tmp_path / "auto" / "build.ninja").read_text().replace("HAS_CUDA", "")


def test_what_is_no_choice_about_cuda_is_refused(tmp_path):
    refused = configure(tmp_path, "-DCPR_EXT_CUDA=MAYBE")
    assert "CPR_EXT_CUDA is 'MAYBE'; allowed: AUTO, ON, OFF" in refused.stderr


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@pytest.fixture(scope="module")
def known_compilers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder for one choice after another: CMake looks for compilers once, for seconds."""
    return tmp_path_factory.mktemp("known_compilers")


@needs_nvcc
@pytest.mark.parametrize(
    ("list_", "generated"),
    [
        (None, {"80,code=[sm_80]", "90,code=[compute_90,sm_90]"}),
        ("9.0+PTX", {"90,code=[compute_90,sm_90]"}),
        ("8.0;8.6 9.0a", {"80,code=[sm_80]", "86,code=[sm_86]", "90a,code=[sm_90a]"}),
    ],
)
def test_the_gpus_to_build_for_are_those_torch_would_build_for(
    known_compilers, monkeypatch, list_, generated
):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)  # CI sets it
    environment = {} if list_ is None else {"TORCH_CUDA_ARCH_LIST": list_}
    done = configure(known_compilers, "-DCPR_EXT_CUDA=ON", **environment)
    assert done.returncode == 0, done.stderr
    text = (known_compilers / "build.ninja").read_text()
    found = set(re.findall(r"generate-code=arch=compute_([0-9a-z]+,code=\[[^\]]*\])", text))
    assert found == generated


@needs_nvcc
def test_a_list_of_gpus_that_cannot_be_read_is_refused(known_compilers):
    refused = configure(known_compilers, TORCH_CUDA_ARCH_LIST="Hopper")
    assert "TORCH_CUDA_ARCH_LIST has 'Hopper'; allowed are such as 8.0" in refused.stderr


def test_a_source_archive_holds_all_that_is_compiled(tmp_path, source):
    program = f"from setuptools import build_meta as b; b.build_sdist(r'{tmp_path}')"
    run(sys.executable, "-c", program, cwd=source)
    (archive,) = tmp_path.glob("cpr_ext-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    needed = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.py")}
    assert {"CMakeLists.txt", "cmake/cuda.cmake", "setup.py", "README.md", *needed} <= names
