"""Shared by all tests: where they import from, and hypothesis profiles.

The checkout is appended to the path, not inserted: ``python_tests.*`` can be imported, and the
cpr_ext under test stays the installed one or that on PYTHONPATH (such as a sanitizer build).
Profiles are chosen by CPR_EXT_HYPOTHESIS=dev|ci|mutants|sanitize|threads (dev if unset).

Tests with the marker ``gpu`` are skipped where there is no GPU. CPR_EXT_GPU=required makes every
skip of such a test a failure; ``emulated`` lets them run on what python_tests/emulated_gpu.py sets.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).resolve().parents[1]))

# A shell's background jobs ignore Ctrl-C, and what they start inherits that; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_COMMON = {
    "deadline": None,  # the machine's other work is no failure of ours
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", max_examples=60, **_COMMON)
settings.register_profile("ci", max_examples=300, print_blob=True, **_COMMON)
settings.register_profile("mutants", max_examples=15, **_COMMON)
settings.register_profile("sanitize", max_examples=15, **_COMMON)
settings.register_profile("threads", max_examples=5, **_COMMON)
settings.load_profile(os.environ.get("CPR_EXT_HYPOTHESIS", "dev"))


def pytest_report_header() -> str:
    from cpr_ext._native import native

    return f"native core: {native.__file__}"


def pytest_sessionstart() -> None:
    """Each process of a sanitizer's run has the core that was built with it, or there is no run."""
    from cpr_ext._native import native

    built = os.environ.get("CPR_EXT_BUILT_IN", "")
    if not str(native.__file__).startswith(built):
        pytest.exit(f"the native core is {native.__file__}, none of {built}", returncode=3)


def pytest_collection_finish() -> None:
    """What was imported stays: let no garbage collection walk through all of torch again."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """No test is run on a GPU by its parameters alone: the marker chooses those of ``make gpu``.

    One that has the emulated device gets its marker, be it by a parameter or by the fixture.
    """
    given = getattr(item, "callspec", None)
    values = given.params.values() if given else ()
    flat = [each for v in values for each in (v if isinstance(v, tuple) else (v,))]
    names = {each for each in flat if isinstance(each, str)}
    if "cuda" in names and item.get_closest_marker("gpu") is None:
        raise pytest.UsageError(f"{item.nodeid} runs on a GPU without the marker 'gpu'")
    if "emulated" in names or "emulated" in getattr(item, "fixturenames", ()):
        item.add_marker("emulated")


def _no_gpu() -> str:
    """Why tests cannot use a GPU; empty: they can."""
    import torch

    from cpr_ext._native import native

    if os.environ.get("CPR_EXT_GPU") == "emulated":
        return ""
    if not native.has_cuda:
        return "this build has no CUDA"
    if native.num_devices() == 0:
        return "no CUDA device or driver"
    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (why := _no_gpu()):
        pytest.skip(f"needs a GPU: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_required = os.environ.get("CPR_EXT_GPU") == "required"
    if report.skipped and is_required and item.get_closest_marker("gpu") is not None:
        report.outcome = "failed"
        report.longrepr = f"skipped, with CPR_EXT_GPU=required: {report.longrepr}"
    return report


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A file whose tests leave a process group fails itself, rather than one that comes later."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a test left its process group")


class SmallDisk(type(Path())):  # type: ignore[misc]
    """The path of a file system of 4 MB."""

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all space but this, by a file ``filler``."""
        free = os.statvfs(self)
        with (self / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave_bytes)


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path_factory.mktemp("disk"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture(scope="session")
def real_movietweetings() -> Path:
    """The full data set, which the tree carries: S. Dooms, MIT licence."""
    return whole_data_set(Path(__file__).parent / "data" / "movietweetings")


def whole_data_set(folder: Path) -> Path:
    """Fails where a file of it is missing: a run without its data shows nothing."""
    for name in ("ratings.dat.gz", "movies.dat.gz"):
        if not (folder / name).is_file():
            pytest.fail(f"{folder / name} is missing; restore it: git checkout python_tests/data")
    return folder
