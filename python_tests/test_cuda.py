"""Tables on CUDA devices, as far as a machine without one shows it; the rest is in test_gpu."""

from types import SimpleNamespace

import pytest
import torch

from cpr_ext import cuda
from cpr_ext.errors import UsageError


class OnDevice:
    """What ``cuda`` asks of a tensor, of one on a device that this machine does not have."""

    is_cuda = True

    def __init__(self, device):
        self.device = torch.device("cuda", device)

    def get_device(self):
        return self.device.index


def test_a_tensor_of_the_cpu_is_on_no_device():
    tensor = torch.zeros(2)
    assert cuda.device_of(tensor) is None
    assert cuda.devices_of([tensor, tensor]) == []
    assert cuda.stager_of(tensor) is None
    cuda.keep_for_stream(tensor)
    cuda.use_training_streams([])
    assert cuda.make_stagers([], slot_bytes=4096, num_slots=2) == []


def test_a_build_without_cuda_refuses_a_tensor_on_a_device(monkeypatch):
    monkeypatch.setattr(cuda, "native", SimpleNamespace(has_cuda=False))
    with pytest.raises(UsageError, match="on cuda:1, but this cpr_ext was built without CUDA"):
        cuda.device_of(OnDevice(1))


class Native:
    """A build with CUDA, and devices with memory for slots of 8 kB."""

    has_cuda = True

    class DeviceStager:
        def __init__(self, *, device, slot_bytes, num_slots):
            self.device = device
            self.slot_bytes = min(slot_bytes, 8192)


def test_devices_are_listed_once_in_order(monkeypatch):
    monkeypatch.setattr(cuda, "native", Native)
    tensors = [OnDevice(1), torch.zeros(1), OnDevice(0), OnDevice(1)]
    assert cuda.devices_of(tensors) == [0, 1]


def test_smaller_buffers_of_a_device_are_warned_of(monkeypatch):
    monkeypatch.setattr(cuda, "native", Native)
    with pytest.warns(UserWarning, match="device 1 has no memory for 2 .* they have 8192"):
        [stager] = cuda.make_stagers([1], slot_bytes=65536, num_slots=2)
    assert stager.device == 1


def test_a_device_has_one_stager_while_it_lives(monkeypatch):
    monkeypatch.setattr(cuda, "native", Native)
    monkeypatch.setattr(cuda, "keep_for_stream", lambda tensor: None)
    made = cuda.make_stagers([0], slot_bytes=4096, num_slots=2)
    assert cuda.stager_of(OnDevice(0)) is made[0]
    del made
    with pytest.warns(UserWarning, match="device 0"):
        assert cuda.stager_of(OnDevice(0)).slot_bytes == 8192
