"""Runs tests with every table on the emulated CUDA device.

    python -m python_tests.emulated_gpu PYTEST_ARGUMENTS

The native core is then ``cpr_ext._emulated``, in which the CUDA sources run on the CPU, and every
tensor counts as lying on device 0. Its stream runs what is submitted at once: PyTorch, which is on
the CPU, submits nothing to it. What a GPU refuses is replaced by what it has.
"""

import importlib
import os
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import cpr_ext
from cpr_ext import _emulated


def emulate() -> None:
    """From now on; modules of cpr_ext that are imported already get the other core, too."""
    os.environ["CPR_EXT_GPU"] = "emulated"
    real = sys.modules.get("cpr_ext._C")
    sys.modules["cpr_ext._C"] = _emulated
    cpr_ext._C = _emulated
    _rebind("native", real, _emulated)
    devices = importlib.import_module("cpr_ext.runtime.cuda")
    _rebind("device_of", devices.device_of, _device_of)
    devices._current_stream = lambda device: 0
    devices._record_stream = lambda tensor, device: None


def _rebind(name: str, before: Any, now: Any) -> None:
    """In every module of cpr_ext that has it under this name."""
    for module in list(sys.modules.values()):
        of_package = getattr(module, "__name__", "").startswith("cpr_ext.")
        if of_package and before is not None and getattr(module, name, None) is before:
            setattr(module, name, now)


def _device_of(tensor: torch.Tensor) -> int:
    return 0


class OnHost(TorchFunctionMode):
    """PyTorch puts on the CPU what is to go to a CUDA device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        named = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        return function(*map(_on_host, args), **named)


def _on_host(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if is_device else value


def main(arguments: list[str]) -> int:
    import pytest

    emulate()
    _emulated.emulator.shuffle_threads(7)
    status = pytest.main(arguments)
    print("kernels launched:", _emulated.emulator.calls().get("cudaLaunchKernelEx", 0))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
