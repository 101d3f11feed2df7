"""Checks of the CPU and of CUDA, on machines that this one is not."""

import sys
from types import SimpleNamespace

import pytest

from cpr_ext.wings.tools.doctor import processors


def native(*, has_cuda=True, sets=("portable", "avx512"), devices=1):
    return SimpleNamespace(
        has_cuda=has_cuda,
        instruction_set=lambda: sets[-1],
        instruction_sets=lambda: list(sets),
        num_devices=lambda: devices,
    )


def torch(*, built=True, devices=1):
    cuda = SimpleNamespace(
        is_available=lambda: devices > 0,
        device_count=lambda: devices,
        get_device_name=lambda number: "H200",
    )
    version = SimpleNamespace(cuda="13.0" if built else None)
    return SimpleNamespace(__version__="2.13.0", cuda=cuda, version=version)


@pytest.mark.parametrize(
    ("cores", "found", "status", "words"),
    [
        (8, native(), "ok", ""),
        (8, native(sets=("portable",)), "note", "AVX-512"),
        (8, native(sets=("portable", "avx2")), "note", "AVX-512"),
        (1, native(), "note", "a second core"),
        (8, None, "note", "see cpr_ext above"),
    ],
)
def test_cpus(monkeypatch, cores, found, status, words):
    monkeypatch.setattr(processors, "_native", lambda: found)
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    check = processors.check_cpu()
    assert (check.status, words in check.remedy) == (status, True)
    assert check.found.startswith(f"{cores} cores")


@pytest.mark.parametrize(
    ("of_torch", "found", "has_gpu", "status", "words"),
    [
        (torch(), native(), True, "ok", ""),
        (torch(devices=2), native(devices=1), True, "wrong", "update the NVIDIA driver"),
        (torch(), native(has_cuda=False), True, "note", "CPR_EXT_CUDA=ON"),
        (torch(), None, True, "note", "CPR_EXT_CUDA=ON"),
        (torch(devices=0), native(), True, "note", "NVIDIA driver"),
        (torch(devices=0), native(), False, "ok", ""),
        (torch(built=False), native(), True, "note", "a torch with CUDA"),
        (torch(built=False), native(), False, "ok", ""),
        (None, native(), False, "note", "see torch above"),
    ],
)
def test_cuda(monkeypatch, of_torch, found, has_gpu, status, words):
    monkeypatch.setitem(sys.modules, "torch", of_torch)
    monkeypatch.setattr(processors, "_native", lambda: found)
    monkeypatch.setattr(processors, "_has_gpu", lambda: has_gpu)
    check = processors.check_cuda()
    assert (check.status, words in check.remedy) == (status, True)
    assert bool(check.remedy) == (status != "ok")


def test_this_machine_can_be_examined():
    assert processors.check_cpu().found
    assert processors.check_cuda().found
