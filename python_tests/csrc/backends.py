"""Where an operation with a CUDA form runs in the tests: one suite, every backend.

``emulated`` is the CUDA sources compiled as C++ (``csrc/testing/include/cuda_runtime.h``): their
kernels run on the CPU, with threads in a random order. ``cuda`` is a GPU: its tests have the marker
``gpu`` (python_tests/conftest.py).
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest

from cpr_ext._native import native
from python_tests.csrc.segments import SANITIZER

#: For ``params`` and ``parametrize``.
DEVICE_NAMES = ("emulated", pytest.param("cuda", marks=pytest.mark.gpu))
NAMES = ("cpu", *DEVICE_NAMES)


@dataclass(frozen=True)
class Backend:
    """
    Attributes:
        native: the compiled module that has it.
        device: number of the CUDA device; None: the CPU.
    """

    name: str
    native: ModuleType
    device: int | None

    def put(self, array):
        """The same values in the backend's memory; numpy's own array where that is the host's."""
        if self.name != "cuda":
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).to(f"cuda:{self.device}")

    def get(self, array):
        return array if isinstance(array, np.ndarray) else array.cpu().numpy()

    def stager(self, slot_bytes=64 * 1024, num_slots=2):
        """What copies rows between its tables and the host; None: the CPU."""
        if self.device is None:
            return None
        options = {"slot_bytes": slot_bytes, "num_slots": num_slots}
        return self.native.DeviceStager(device=self.device, **options)

    def access_counter(self, name, num_rows):
        return self._tracker("AccessCounter", name=name, num_rows=num_rows)

    def row_sampler(self, name, num_rows, **options):
        return self._tracker("RowSampler", name=name, num_rows=num_rows, **options)

    def dirty_rows(self, name, num_rows):
        return self._tracker("DirtyRows", name=name, num_rows=num_rows)

    def change_meter(self, name, weight):
        moved = self.put(weight) if isinstance(weight, np.ndarray) else weight
        return self._tracker("ChangeMeter", name=name, weight=moved)

    def _tracker(self, kind, **options):
        """A tracker, on the backend's device its form for devices."""
        if self.device is None:
            return getattr(self.native, kind)(**options)
        tracker = getattr(self.native, f"Device{kind}")(**options, device=self.device)
        return Moving(self, tracker)


class Moving:
    """A tracker of a backend that is told arrays of numpy, wherever its memory is."""

    def __init__(self, backend, tracker):
        self.tracker = tracker
        self._backend = backend

    def __getattr__(self, name):
        found = getattr(self.tracker, name)
        return functools.partial(self._call, found) if callable(found) else found

    def __repr__(self):
        return repr(self.tracker)

    def observe(self, indices):
        self.tracker.observe(self._backend.put(indices))

    def _call(self, method, *args, weight=None, pool=None, **options):
        """A thread pool is of another module, and no device's business."""
        if weight is not None:
            is_moved = isinstance(weight, np.ndarray)
            options["weight"] = self._backend.put(weight) if is_moved else weight
        return method(*args, **options)


#: A tracker of each kind, of a table of so many rows.
KINDS = {
    "DirtyRows": lambda found, name="users", rows=100: found.dirty_rows(name, rows),
    "AccessCounter": lambda found, name="users", rows=100: found.access_counter(name, rows),
    "RowSampler": lambda found, name="users", rows=100: found.row_sampler(
        name, rows, capacity=rows // 2, period=1
    ),
    "ChangeMeter": lambda found, name="users", rows=100: found.change_meter(
        name, np.zeros((rows, 4), np.float32)
    ),
}


@functools.cache
def _set_imports_apart():
    """From now on a collection looks through what tests have made alone, which takes little."""
    gc.collect()
    gc.freeze()


def live_bytes(emulated):
    """Device memory that is allocated, but for what earlier tests have left as garbage.

    Trackers of theirs that are part of a cycle would be freed at any time, perhaps between two
    calls of this.
    """
    _set_imports_apart()
    gc.collect()
    return sum(emulated.native.emulator.allocations().values())


def find(name):
    """The backend of this name; the test skips, or fails, where it is not."""
    if name == "cpu":
        return Backend(name, native, None)
    if name == "emulated":
        if SANITIZER and os.environ.get("CPR_EXT_EMULATED") != "1":
            pytest.skip("built without the sanitizer; tools/sanitize.sh device has it")
        # Not built is a failure: `make build` builds it, and then nothing else runs the kernels.
        return Backend(name, importlib.import_module("cpr_ext._emulated"), 0)
    return Backend(name, native, 0)
