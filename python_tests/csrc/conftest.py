"""What native tests hold for: every instruction set of this CPU, every backend of an operation."""

import contextlib
import importlib

import pytest

from cpr_ext._native import native
from python_tests.csrc import backends
from python_tests.csrc.storage import faulty_io

#: Emulated threads never run in their order: what depends on it fails somewhere.
THREADS_SEED = 1


#: Only rows are rounded by a form for AVX2; all else is portable there.
WITHOUT_AVX2 = [name for name in native.instruction_sets() if name != "avx2"]


@pytest.fixture(scope="module", params=WITHOUT_AVX2)
def every_instruction_set(request):
    before = native.instruction_set()
    native.use_instruction_set(request.param)
    yield
    native.use_instruction_set(before)


@pytest.fixture(params=backends.NAMES)
def backend(request):
    """Each place where the operation runs, see backends.py."""
    return backends.find(request.param)


@pytest.fixture(params=backends.DEVICE_NAMES)
def device(request):
    """Each backend with a device."""
    return backends.find(request.param)


@pytest.fixture
def emulated():
    """The emulated device; afterwards it is as it was, and nothing fails any more."""
    found = backends.find("emulated")
    found.native.trim_memory(0)  # or memory that earlier tests have freed serves where it is short
    yield found
    found.native.emulator.fail_call("", 0)
    found.native.emulator.set_lazy(False)
    found.native.emulator.shuffle_threads(THREADS_SEED)
    found.native.emulator.set_capturing(False)
    found.native.emulator.set_device(0)
    found.native.emulator.set_num_devices(1)
    found.native.emulator.set_memory_pools(True)
    found.native.emulator.set_free_part(1.0)


@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    """A library to preload, by which file operations fail on demand."""
    return faulty_io.library(tmp_path_factory.mktemp("faulty_io"))


@pytest.fixture(autouse=True)
def marked_if_emulated(request):
    """Whatever runs a kernel has the marker, by which `make gpu` and tools/ choose such tests."""
    try:
        emulator = importlib.import_module("cpr_ext._emulated").emulator
    except ImportError:
        yield
        return
    emulator.calls()
    yield
    if request.node.get_closest_marker("emulated") is None:
        assert "cudaLaunchKernelEx" not in emulator.calls(), "it has no marker 'emulated'"


@pytest.fixture(autouse=True, scope="session")
def shuffled_threads():
    """As `emulated` leaves them."""
    with contextlib.suppress(ImportError):
        emulator = importlib.import_module("cpr_ext._emulated").emulator
        emulator.shuffle_threads(THREADS_SEED)
