"""Runs tests with every table on the emulated CUDA device.

    python -m python_tests.emulated_gpu PYTEST_ARGUMENTS

The native core is then ``cpr_ext._emulated``, in which the CUDA sources run on the CPU, and every
tensor counts as lying on device 0. Its stream runs what is submitted at once: PyTorch, which is on
the CPU, submits nothing to it. What a GPU refuses is replaced by what it has.
"""

import functools
import sys
from typing import Any

import torch

import cpr_ext
from cpr_ext import _emulated

sys.modules["cpr_ext._C"] = _emulated
cpr_ext._C = _emulated

from cpr_ext import devices


def _device_of(tensor: torch.Tensor) -> int:
    return 0


devices.device_of = _device_of  # before anyone imports it
devices._current_stream = lambda device: 0

from cpr_ext.checkpointer import Checkpointer
from cpr_ext.priorities import LargestChange, MostFrequentlyUsed, SubSampledUsed


def _as_on_a_gpu(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(self: Checkpointer, *args: Any, **options: Any) -> None:
        if options.get("overlap") == "always":
            options["overlap"] = "never"
        if isinstance(priority := options.get("priority"), SubSampledUsed | LargestChange):
            options["priority"] = MostFrequentlyUsed(priority.fraction)
        init(self, *args, **options)

    return wrapped


Checkpointer.__init__ = _as_on_a_gpu(Checkpointer.__init__)  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    import pytest

    _emulated.emulator.shuffle_threads(7)
    status = pytest.main(arguments)
    print("kernels launched:", _emulated.emulator.calls().get("cudaLaunchKernelEx", 0))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
