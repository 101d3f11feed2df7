"""tools/wheels.py: which wheels it refuses, and how it compiles for another processor."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
X86, ARM = 0x3E, 0xB7


@pytest.fixture(scope="module")
def tools():
    """(wheels, cross), the modules."""
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools/wheels.py")
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    sys.path.remove(str(ROOT / "tools"))
    sys.modules.pop("cuda_packages")
    return wheels, sys.modules.pop("cross")


def make_wheel(folder, tags, module, machine, *, cuda=b""):
    path = folder / f"cpr_ext-0.1.0-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(module, b"\x7fELF".ljust(18, b"\0") + machine.to_bytes(2, "little") + cuda)
    return path


@pytest.mark.parametrize(
    ("tags", "module", "machine"),
    [
        ("cp310-cp310-manylinux_2_27_x86_64", "cpr_ext/_C.cpython-310-x86_64-linux-gnu.so", X86),
        (
            "cp314-cp314-manylinux_2_27_aarch64.manylinux_2_28_aarch64",
            "cpr_ext/_C.cpython-314-aarch64-linux-gnu.so",
            ARM,
        ),
    ],
)
def test_a_wheel_of_its_tags_is_described(tools, tmp_path, tags, module, machine):
    wheels, _ = tools
    path = make_wheel(tmp_path, tags, module, machine, cuda=b"cudaLaunchKernel")
    wheels.require_portable(path)
    assert wheels.contents(path) == f"{module} 0.0 MB, with CUDA"


@pytest.mark.parametrize(
    ("tags", "module", "machine"),
    [
        ("cp311-cp311-manylinux_2_27_x86_64", "cpr_ext/_C.cpython-310-x86_64-linux-gnu.so", X86),
        ("cp310-cp310-manylinux_2_27_aarch64", "cpr_ext/_C.cpython-310-x86_64-linux-gnu.so", X86),
        ("cp310-cp310-manylinux_2_27_aarch64", "cpr_ext/_C.cpython-310-aarch64-linux-gnu.so", X86),
    ],
)
def test_a_module_of_another_python_or_processor_is_refused(tools, tmp_path, tags, module, machine):
    wheels, _ = tools
    with pytest.raises(SystemExit, match="holds cpr_ext/_C"):
        wheels.contents(make_wheel(tmp_path, tags, module, machine))


@pytest.mark.parametrize("tag", ["manylinux_2_36_x86_64", "linux_x86_64"])
def test_a_wheel_for_new_machines_only_is_refused(tools, tag):
    wheels, _ = tools
    with pytest.raises(SystemExit, match=r"needs a glibc newer than 2\.35"):
        wheels.require_portable(Path(f"cpr_ext-0.1.0-cp311-cp311-{tag}.whl"))
