"""Tables on CUDA devices: which device, on which stream training uses it, and its staging buffers.

The native core submits its work on a device to the stream that is current in PyTorch when the
training thread calls the Checkpointer. So it is ordered with the work that training submits there:
lookups are counted after they were made. Rows are captured between two optimizer steps, and no
thread waits.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import CudaError, UsageError

_stagers: weakref.WeakValueDictionary[int, native.DeviceStager] = weakref.WeakValueDictionary()
_DEFAULT_SLOT_BYTES = 8 << 20
# So far the device may lag behind training's calls before the oldest tensors are waited for.
_MOST_MARKS = 64
# As torch's own compiled code asks: no Python object is made of the stream.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_of(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's CUDA device; None: it is on none.

    Raises:
        UsageError: it is on one, and this build of the library has no CUDA.
    """
    if not tensor.is_cuda:
        return None
    if not native.has_cuda:
        raise UsageError(
            f"a table is on {tensor.device}, but this cpr_ext was built without CUDA; install it "
            "where nvcc is found, with CPR_EXT_CUDA=ON"
        )
    return tensor.get_device()


def devices_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the CUDA devices of the tensors, ascending."""
    return sorted({device for t in tensors if (device := device_of(t)) is not None})


def use_training_streams(devices: Sequence[int]) -> None:
    """Send this thread's later native work to the streams that are current in PyTorch.

    It comes after all that was submitted to the streams before, which may be others.
    """
    if not devices:
        return
    if not is_capturing():  # no question about an event belongs into a graph
        _held.release()
    for device in devices:
        native.use_stream(device, _current_stream(device))


def copy_to_host(values: torch.Tensor) -> Callable[[], list[int]]:
    """Begin to copy values (n,) to the host; the call that is returned waits for them alone."""
    device = device_of(values)
    if device is None:
        now = values.tolist()
        return lambda: now
    there = values.to("cpu", non_blocking=True)  # in pinned memory
    use_training_streams([device])
    mark = native.StreamMark(device=device)

    def read() -> list[int]:
        mark.wait()
        return there.tolist()

    return read


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph, so that what it is given waits."""
    return _is_torch_on_gpu() and torch.cuda.is_current_stream_capturing()


def _is_torch_on_gpu() -> bool:
    """Return whether torch uses a GPU in this process."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _current_stream(device: int) -> int:
    if _raw_stream is not None:
        return int(_raw_stream(device))
    return int(torch.cuda.current_stream(device).cuda_stream)


class _HeldTensors(threading.local):
    """Tensors that this thread's native work reads on devices, until that is done.

    PyTorch reuses a tensor's memory once nobody has the tensor and the stream on which it was
    allocated is past its last use there. The native work may be on another stream. So the tensors
    are held until that work is done, which one mark per call shows, instead of a ``record_stream``
    per tensor.
    """

    def __init__(self) -> None:
        self._marked: deque[tuple[list[Any], list[torch.Tensor]]] = deque()

    def hold(self, tensors: list[torch.Tensor], devices: Iterable[int]) -> None:
        """Hold them until the work is done that was submitted until now."""
        if not tensors or is_capturing():
            return  # of a graph: they belong to its own memory
        try:
            marks = [native.StreamMark(device=device) for device in devices]
        except CudaError:  # the next call that is checked reports what is wrong
            for tensor in tensors:
                record_on_stream(tensor)
        else:
            self._marked.append((marks, tensors))

    def release(self, *, wait: bool = False) -> None:
        """Let go what is done; of more than some calls wait for the oldest."""
        try:
            while self._marked:
                marks, _ = self._marked[0]
                if wait or len(self._marked) > _MOST_MARKS:
                    for mark in marks:
                        mark.wait()
                elif not all(mark.is_passed() for mark in marks):
                    return
                self._marked.popleft()
        except CudaError:  # the device is lost: nothing will be used any more
            self._marked.clear()


_held = _HeldTensors()


@contextmanager
def kept_for_stream(tensors: list[torch.Tensor], devices: Collection[int]) -> Iterator[None]:
    """Keep tensors until the native work is done that this context submits to the devices.

    For tensors that live shorter than that work, such as lookups: see also
    :func:`record_on_stream`.

    Args:
        tensors: what is in it at the end.
    """
    try:
        yield
    finally:
        if devices:
            _held.hold(tensors, devices)


def release_kept() -> None:
    """Wait until what this thread has kept for streams is used, and let go of it."""
    _held.release(wait=True)


def record_on_stream(tensor: torch.Tensor) -> None:
    """Record in PyTorch that the current stream uses a tensor that is not to be kept: a table."""
    device = device_of(tensor)
    if device is not None:
        _record_stream(tensor, device)


def _record_stream(tensor: torch.Tensor, device: int) -> None:
    tensor.record_stream(torch.cuda.current_stream(device))


def trim_memory(devices: Sequence[int], *, if_short: bool = False) -> None:
    """Give memory that no snapshot uses any more back to torch and other allocators.

    Args:
        if_short: only if little of the device's memory is free. The next snapshot maps again
            what is given back, which takes longer than to use it.
    """
    for device in devices:
        with suppress(CudaError):  # it is broken; whoever needs it next is told
            if if_short:
                native.trim_memory_if_short(device)
            else:
                native.trim_memory(device)


def _free_cache(device: int) -> bool:
    """Free what torch's allocator keeps for later; return whether it has one."""
    if not _is_torch_on_gpu():
        return False
    torch.cuda.empty_cache()
    return True


if native.has_cuda:
    native.set_memory_reclaimer(lambda device: _free_cache(device))


def make_stagers(devices: Sequence[int], *, slot_bytes: int, num_slots: int) -> list[Any]:
    """Return a native ``DeviceStager`` per device; :func:`stager_of` gives it out while it lives.

    If a device's memory is short, its buffers are smaller, with a warning. Rows are then copied in
    several rounds, and training on that device waits for all but the last.
    """
    stagers = []
    for device in devices:
        stager = native.DeviceStager(device=device, slot_bytes=slot_bytes, num_slots=num_slots)
        if stager.slot_bytes < slot_bytes:
            warnings.warn(
                f"device {device} has no memory for {num_slots} staging slots of {slot_bytes} "
                f"bytes; they have {stager.slot_bytes}. Free some, or choose smaller slot_bytes",
                stacklevel=3,
            )
        _stagers[device] = stager
        stagers.append(stager)
    return stagers


def stager_of(tensor: torch.Tensor) -> Any:
    """Return the copier of rows between a tensor's device and slots; None: it is on no device.

    The caller keeps the tensor until its rows have arrived.
    """
    device = device_of(tensor)
    if device is None:
        return None
    stager = _stagers.get(device)
    if stager is None:
        [stager] = make_stagers([device], slot_bytes=_DEFAULT_SLOT_BYTES, num_slots=2)
    return stager
