"""Tables on CUDA devices, as far as a machine without one shows it; the rest is in test_gpu."""

import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from cpr_ext.errors import CudaError, UsageError
from cpr_ext.runtime import cuda


class OnDevice:
    """What ``cuda`` asks of a tensor, of one on a device that this machine does not have."""

    is_cuda = True

    def __init__(self, device):
        self.device = torch.device("cuda", device)

    def get_device(self):
        return self.device.index


class Native:
    """A build with CUDA, and devices with memory for slots of 8 kB."""

    has_cuda = True

    class DeviceStager:
        def __init__(self, *, device, slot_bytes, num_slots):
            self.device = device
            self.slot_bytes = min(slot_bytes, 8192)


def test_devices_are_listed_once_in_order_and_each_has_one_stager_while_it_lives(monkeypatch):
    monkeypatch.setattr(cuda, "native", SimpleNamespace(has_cuda=False))
    with pytest.raises(UsageError, match="on cuda:1, but this cpr_ext was built without CUDA"):
        cuda.device_of(OnDevice(1))
    monkeypatch.setattr(cuda, "native", Native)
    assert cuda.devices_of([OnDevice(1), torch.zeros(1), OnDevice(0), OnDevice(1)]) == [0, 1]
    with pytest.warns(UserWarning, match="device 1 has no memory for 2 .* they have 8192"):
        [stager] = cuda.make_stagers([1], slot_bytes=65536, num_slots=2)
    assert stager.device == 1
    made = cuda.make_stagers([0], slot_bytes=4096, num_slots=2)
    assert cuda.stager_of(OnDevice(0)) is made[0]
    del made
    with pytest.warns(UserWarning, match="device 0"):
        assert cuda.stager_of(OnDevice(0)).slot_bytes == 8192


class Stream:
    """A device's stream: work is done up to a place; marks lie behind what was submitted."""

    def __init__(self):
        self.submitted = self.done = self.marks = 0
        self.is_lost = False

    def mark(self, *, device):
        self.marks += 1
        return Mark(self, self.submitted)


class Mark:
    def __init__(self, stream, place):
        self.stream = stream
        self.place = place

    def is_passed(self):
        if self.stream.is_lost:
            raise CudaError("lost")
        return self.stream.done >= self.place

    def wait(self):
        self.stream.done = max(self.stream.done, self.place)


@pytest.fixture
def stream(monkeypatch):
    """That of device 0, on which every tensor lies; nothing is held from before."""
    stream = Stream()
    native = SimpleNamespace(has_cuda=True, StreamMark=stream.mark, use_stream=lambda d, s: None)
    monkeypatch.setattr(cuda, "native", native)
    monkeypatch.setattr(cuda, "device_of", lambda tensor: 0)
    monkeypatch.setattr(cuda, "_current_stream", lambda device: 0)
    monkeypatch.setattr(cuda, "_held", cuda._HeldTensors())
    return stream


def kept(stream, names):
    """Tensors that were given to a step's work, by weak references."""
    tensors = {name: torch.zeros(1) for name in names}
    with cuda.kept_for_stream(list(tensors.values()), [0]):
        stream.submitted += 1
    return {name: weakref.ref(tensor) for name, tensor in tensors.items()}


def test_tensors_are_kept_until_the_stream_is_past_the_work_that_reads_them(stream):
    first = kept(stream, "ab")
    cuda.use_training_streams([0])
    second = kept(stream, "c")
    cuda.use_training_streams([0])
    assert all(reference() is not None for reference in [*first.values(), *second.values()])
    stream.done = 1
    cuda.use_training_streams([0])
    assert all(reference() is None for reference in first.values())
    assert second["c"]() is not None
    stream.done = 2
    cuda.use_training_streams([0])
    assert second["c"]() is None
    assert stream.marks == 2  # one for each step, however many tensors it had


def test_a_host_far_ahead_waits_for_the_oldest_and_closing_for_all(stream):
    steps = []
    for _ in range(cuda._MOST_MARKS + 5):
        steps.append(kept(stream, "a")["a"])
        cuda.use_training_streams([0])
    assert [reference() is None for reference in steps] == [True] * 5 + [False] * cuda._MOST_MARKS
    cuda.release_kept()
    assert all(reference() is None for reference in steps)
    assert stream.done == stream.submitted


def test_where_no_mark_can_be_made_pytorch_keeps_the_memory(stream, monkeypatch):
    def fails(**options):
        raise CudaError("no event")

    recorded = []
    monkeypatch.setattr(cuda.native, "StreamMark", fails)
    monkeypatch.setattr(cuda, "_record_stream", lambda tensor, device: recorded.append(device))
    kept(stream, "ab")
    cuda.use_training_streams([0])
    assert recorded == [0, 0]


def test_of_a_lost_device_and_of_what_a_graph_captures_nothing_is_kept(stream, monkeypatch):
    step = kept(stream, "a")
    stream.is_lost = True
    cuda.use_training_streams([0])
    assert step["a"]() is None
    stream.marks = 0
    monkeypatch.setattr(cuda, "is_capturing", lambda: True)
    step = kept(stream, "a")
    cuda.use_training_streams([0])
    assert step["a"]() is None
    assert stream.marks == 0


def test_no_mark_is_asked_for_while_a_graph_is_captured(stream, monkeypatch):
    """Which would end the capture; what was kept before stays, as what reads it may still run."""
    step = kept(stream, "a")
    stream.done = 1
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "is_capturing", lambda: True)
        patch.setattr(Mark, "is_passed", None)
        patch.setattr(Mark, "wait", None)
        for _ in range(cuda._MOST_MARKS + 1):
            cuda.use_training_streams([0])
    assert step["a"]() is not None
    cuda.use_training_streams([0])
    assert step["a"]() is None


def test_what_a_failing_call_has_submitted_is_kept(stream):
    kept = [torch.zeros(1)]
    reference = weakref.ref(kept[0])
    with suppress(CudaError), cuda.kept_for_stream(kept, [0]):
        stream.submitted += 1
        raise CudaError("an earlier batch had a bad row")
    del kept
    assert reference() is not None
    stream.done = 1
    cuda.use_training_streams([0])
    assert reference() is None


def test_the_stream_is_asked_for_as_a_number_where_torch_has_that(monkeypatch):
    told = []
    monkeypatch.setattr(cuda, "native", SimpleNamespace(use_stream=lambda *pair: told.append(pair)))
    monkeypatch.setattr(cuda, "_raw_stream", lambda device: 70 + device)
    cuda.use_training_streams([0, 1])
    assert told == [(0, 70), (1, 71)]
    monkeypatch.setattr(cuda, "_raw_stream", None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=80 + device)
    )
    cuda.use_training_streams([1])
    assert told[2:] == [(1, 81)]
