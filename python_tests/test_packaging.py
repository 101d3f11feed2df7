"""What ``pip install .`` makes, in an environment that has neither torch nor nvcc."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **options: object) -> str:
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a venv with nothing but this package, built by pip in isolation."""
    folder = tmp_path_factory.mktemp("packaging")
    # pip's isolated build environment has what pyproject.toml asks for: no torch.
    without_nvcc = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if not (Path(part) / "nvcc").exists()
    )
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, ROOT),
        env={**os.environ, "PATH": without_nvcc},
    )
    (wheel,) = folder.glob("cpr_ext-*.whl")
    environment = folder / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel)
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
        "print((r.files('cpr_ext') / 'dlrm' / 'access_locality.json').is_file(),\n"
        "      (r.files('cpr_ext') / 'py.typed').is_file())"
    )
    assert run(bare_python, "-c", program, cwd="/").split() == ["True", "True"]
