"""Runs what of bench/ needs a GPU on the emulated one, at tiny sizes.

    python -m python_tests.emulated_bench targets|profile FOLDER

The emulated device's memory is the host's, and it does at once what it is told: so the clocks are
the host's, and what they show means nothing.
"""

import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from python_tests.emulated_gpu import emulate

ROOT = Path(__file__).resolve().parents[1]


class Interval:
    """As gpu_device.Interval, on the host's clock."""

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        return self._end - self._begin


@cache
def compiled_bounds() -> Any:
    """gpu_bounds.cu as C++, its kernels emulated."""
    import gpu_bounds

    testing = ROOT / "csrc" / "testing"
    emulator = [str(path) for path in testing.glob("*.cpp") if not path.match("broken_*")]
    flags = [
        "-O1",
        "-std=c++17",
        "-shared",
        "-fPIC",
        f"-I{testing / 'include'}",
        f"-I{ROOT / 'csrc'}",
    ]
    return gpu_bounds.compile_with(["g++", *flags, *emulator, "-x", "c++", str(gpu_bounds.SOURCE)])


def use_emulated_device() -> None:
    """Before anything else of bench/ is imported."""
    sys.path.insert(0, str(ROOT / "bench"))
    import gpu_bounds
    import gpu_device

    gpu_device.DEVICE = "cpu"
    gpu_device.stream = lambda: 0
    gpu_device.synchronize = gpu_device.flush = lambda: None
    gpu_device.pinned = lambda *shape, dtype: torch.empty(*shape, dtype=dtype)
    gpu_device.Interval = Interval
    gpu_device.device_seconds = gpu_device.kernel_seconds = gpu_device.host_seconds
    gpu_device.describe = lambda: {"gpu": "emulated", "nvidia_smi": "-", "torch_cuda": "-"}
    gpu_bounds.library = compiled_bounds


def main(what: str, folder: Path) -> int:
    emulate()
    use_emulated_device()
    if what == "targets":
        import gpu_targets

        return gpu_targets.measure(True, None)
    import gpu_profile

    trace = folder / "trace.json.gz"
    with tempfile.TemporaryDirectory() as store:
        gpu_profile.record(Path(store) / "store", trace, tiny=True)
    print(f"a trace of {trace.stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
