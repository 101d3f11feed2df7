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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from cpr_ext._native import native
from cpr_ext.errors import CudaError, UsageError

_stagers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
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
    """Send this thread's later native work to the streams that are current in PyTorch."""
    if not devices:
        return
    _held.mark()  # on the streams that were used until now
    _held.release()
    for device in devices:
        native.use_stream(device, _current_stream(device))


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph, so that what it is given waits."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and torch.cuda.is_current_stream_capturing()


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
        self._open: list[torch.Tensor] = []
        self._devices: set[int] = set()
        self._marked: deque[tuple[list[Any], list[torch.Tensor]]] = deque()

    def hold(self, tensor: torch.Tensor, device: int) -> None:
        self._open.append(tensor)
        self._devices.add(device)

    def mark(self) -> None:
        """Note where the streams are: all that is held until now was submitted before."""
        if not self._open:
            return
        held, self._open = self._open, []
        devices, self._devices = self._devices, set()
        if is_capturing():
            return  # it belongs to the graph's own memory
        try:
            marks = [native.StreamMark(device=device) for device in devices]
        except CudaError:  # the next call that is checked reports what is wrong
            for tensor in held:
                record_on_stream(tensor)
        else:
            self._marked.append((marks, held))

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


def keep_for_stream(tensor: torch.Tensor) -> None:
    """Keep a tensor until the native work of this thread that reads it is done.

    For tensors that live shorter than that work, such as lookups: see also
    :func:`record_on_stream`.
    """
    device = device_of(tensor)
    if device is not None:
        _held.hold(tensor, device)


def release_kept() -> None:
    """Wait until what this thread has kept for streams is used, and let go of it."""
    _held.mark()
    _held.release(wait=True)


def record_on_stream(tensor: torch.Tensor) -> None:
    """Record in PyTorch that the current stream uses a tensor that is not to be kept: a table."""
    device = device_of(tensor)
    if device is not None:
        _record_stream(tensor, device)


def _record_stream(tensor: torch.Tensor, device: int) -> None:
    tensor.record_stream(torch.cuda.current_stream(device))


def trim_memory(devices: Sequence[int]) -> None:
    """Give memory that no snapshot uses any more back to torch and other allocators."""
    for device in devices:
        with suppress(CudaError):  # it is broken; whoever needs it next is told
            native.trim_memory(device)


def _free_cache(device: int) -> bool:
    """Free what torch's allocator keeps for later; return whether it has one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
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
