"""Runs tests with every table on the emulated CUDA device.

    python -m python_tests.emulated_gpu PYTEST_ARGUMENTS

The native core is then ``cpr_ext._emulated``, in which the CUDA sources run on the CPU, and every
tensor counts as lying on device 0. Its stream runs what is submitted at once: PyTorch, which is on
the CPU, submits nothing to it. What a GPU refuses is replaced by what it has.
"""

import functools
import importlib
import sys
from typing import Any

import torch

import cpr_ext
from cpr_ext import _emulated


def emulate() -> None:
    """Before anything else of cpr_ext is imported."""
    sys.modules["cpr_ext._C"] = _emulated
    cpr_ext._C = _emulated
    devices = importlib.import_module("cpr_ext.cuda")
    devices.device_of = _device_of
    devices._current_stream = lambda device: 0
    checkpointer = importlib.import_module("cpr_ext.checkpointer").Checkpointer
    checkpointer.__init__ = _as_on_a_gpu(checkpointer.__init__)


def _device_of(tensor: torch.Tensor) -> int:
    return 0


def _as_on_a_gpu(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **options: Any) -> None:
        if options.get("overlap") == "always":
            options["overlap"] = "never"
        init(self, *args, **options)

    return wrapped


def main(arguments: list[str]) -> int:
    import pytest

    emulate()
    _emulated.emulator.shuffle_threads(7)
    status = pytest.main(arguments)
    print("kernels launched:", _emulated.emulator.calls().get("cudaLaunchKernelEx", 0))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
