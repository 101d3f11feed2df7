"""The GPU that is measured: where tensors lie, and how long the device, or the host, takes."""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda"
KERNEL = "kernel"  # a category of events
Work = Callable[[], object]

# While the device waits for so long, the host submits what is then measured without gaps.
_HEAD_START_CYCLES = 20_000_000
# More than a GPU's caches hold.
_FLUSH_BYTES = 256 << 20


def stream() -> int:
    """The stream that is current in PyTorch, as a number."""
    return int(torch.cuda.current_stream().cuda_stream)


def synchronize() -> None:
    """Wait for all that was submitted."""
    torch.cuda.synchronize()


def pinned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that the device copies to and from by itself."""
    return torch.empty(*shape, dtype=dtype, pin_memory=True)


class _Flush:
    """Copies more than the caches hold, so that nobody finds there what the last one left."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def __call__(self) -> None:
        if self._memory is None:
            self._memory = torch.zeros(2, _FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
        self._memory[0].copy_(self._memory[1])


flush = _Flush()


class Interval:
    """Time on the current stream: from when it gets to one place until it gets to another."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        self._begin.record()

    def end(self) -> None:
        self._end.record()

    def seconds(self) -> float:
        """Waits for it."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3


def device_seconds(work: Work) -> float:
    """Time that the current stream takes for it, with cold caches; the host is ahead."""
    synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES)
    flush()
    interval = Interval()
    interval.begin()
    work()
    interval.end()
    return interval.seconds()


def host_seconds(work: Work) -> float:
    """Time from the call until all of it is done, on an idle device with cold caches."""
    flush()
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def kernel_seconds(work: Work) -> float:
    """Time of its kernels alone, with cold caches, as the profiler tells it."""
    from torch.profiler import ProfilerActivity, profile

    flush()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        return kernel_seconds_of(read_events(trace))


def describe() -> dict[str, str]:
    """Device, driver and the versions that decide a measurement."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        told = str(error)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "nvidia_smi": told,
        "torch_cuda": str(torch.version.cuda),
    }


@dataclass(frozen=True)
class Event:
    """One thing done, in seconds from the beginning of the trace's clock."""

    category: str
    name: str
    begin: float
    end: float
    stream: int | None


def read_trace(trace: Path) -> dict[str, Any]:
    """A trace as JSON; compressed if its name ends with .gz, as torch.profiler writes it then."""
    with _opener(trace)(trace, "rt") as file:
        content: dict[str, Any] = json.load(file)
    return content


def write_trace(trace: Path, content: dict[str, Any]) -> None:
    """As :func:`read_trace` reads it."""
    with _opener(trace)(trace, "wt") as file:
        json.dump(content, file)


def _opener(trace: Path) -> Any:
    return gzip.open if trace.suffix == ".gz" else open


def read_events(trace: Path) -> list[Event]:
    """The events with a duration, in the order of their beginnings."""
    found = [
        Event(
            str(event.get("cat", "")),
            str(event.get("name", "")),
            1e-6 * float(event["ts"]),
            1e-6 * (float(event["ts"]) + float(event["dur"])),
            _stream(event.get("args")),
        )
        for event in read_trace(trace)["traceEvents"]
        if event.get("ph") == "X" and "dur" in event
    ]
    return sorted(found, key=lambda event: event.begin)


def _stream(arguments: Any) -> int | None:
    stream = arguments.get("stream") if isinstance(arguments, dict) else None
    return int(stream) if isinstance(stream, int | str) and str(stream).isdigit() else None


def kernel_seconds_of(events: Iterable[Event]) -> float:
    """Time of all kernels.

    Raises:
        RuntimeError: there is none: the profiler does not see this device.
    """
    times = [event.end - event.begin for event in events if event.category == KERNEL]
    if not times:
        raise RuntimeError("the profiler saw no kernel; does it have CUPTI here?")
    return sum(times)
