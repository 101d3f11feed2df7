"""Runs the tests that need a GPU on the emulated device, which takes what a GPU takes alone.

    python -m python_tests.strict_device [--plant FAULT] PYTEST_ARGUMENTS

The backend ``cuda`` of python_tests/csrc is then the emulated module in its strict mode: it refuses
memory of the host where a device's is needed. Tensors that the backend makes say that they lie on
cuda:0, and are refused where memory of the host is needed. So what only works because the emulated
device shares the host's memory fails here, and not on the first GPU.

``--plant`` puts a fault back that this must find: see FAULTS.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cpr_ext import _emulated
from python_tests.csrc import backends


class OnDevice(torch.Tensor):
    """A tensor in the host's memory that says it is on cuda:0."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)

    def get_device(self) -> int:
        return 0


def on_device(array: Any) -> torch.Tensor:
    """A copy of a numpy array, or of a tensor, on the device."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
    return tensor.clone().as_subclass(OnDevice)


@contextmanager
def strict() -> Iterator[None]:
    """The emulated device takes only what says it is on it."""
    _emulated.emulator.set_strict(True)
    try:
        yield
    finally:
        _emulated.emulator.set_strict(False)


class StrictBackend(backends.Backend):
    def put(self, array: np.ndarray) -> Any:
        return on_device(array)


def _put_on_host(self: Any, array: np.ndarray) -> Any:
    return torch.from_numpy(np.array(array))


def _say_host(self: Any) -> bool:
    return True


class Plugin:
    """The backend ``cuda``; its tests count as those of the emulated device, too."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker("emulated")


#: What a test, or a binding, can do wrong on a GPU: what it is replaced by.
FAULTS = {
    "a test passes memory of the host": lambda: setattr(StrictBackend, "put", _put_on_host),
    "a tensor of the device counts as the host's": lambda: setattr(
        OnDevice, "is_cpu", property(_say_host)
    ),
}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--plant"]:
        FAULTS[arguments[1]]()
        arguments = arguments[2:]
    os.environ["CPR_EXT_GPU"] = "emulated"
    find = backends.find
    backends.find = lambda name: (
        StrictBackend("cuda", _emulated, 0) if name == "cuda" else find(name)
    )
    with strict():
        status = pytest.main([*arguments, "-m", "gpu"], plugins=[Plugin()])
    print("kernels launched:", _emulated.emulator.calls().get("cudaLaunchKernelEx", 0))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
