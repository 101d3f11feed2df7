"""Checks of the machine and its packages, with what could be wrong put in their place."""

import errno
import importlib
import os
import sys
from types import SimpleNamespace

import pytest

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.wings.tools import doctor


def test_this_machine_and_environment_are_examined(tmp_path):
    checks = {check.name: check for check in doctor.diagnose(tmp_path).checks}
    assert checks["torch"].status == "ok"
    assert (checks["cpr_ext"].status, cpr_ext.__version__ in checks["cpr_ext"].found) == (
        "ok",
        True,
    )
    assert "direct I/O" in checks["disk"].found
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_load_or_has_two_versions_is_told_with_the_remedy(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "version_of", lambda name: "0.0.9")
        check = doctor.check_native()
        assert (check.status, "pip says 0.0.9" in check.found) == ("note", True)
    for module, examine, remedy in (
        ("torch", doctor.check_torch, "pip install"),
        ("cpr_ext._native", doctor.check_native, "pip install ."),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        check = examine()
        assert (check.status, remedy in check.remedy) == ("wrong", True)
    assert doctor.check_cuda().status == "note"


def native(*, has_cuda=True, devices=1):
    return SimpleNamespace(native=SimpleNamespace(has_cuda=has_cuda, num_devices=lambda: devices))


def torch(*, built=True, devices=1):
    cuda = SimpleNamespace(
        is_available=lambda: devices > 0,
        device_count=lambda: devices,
        get_device_name=lambda number: "H200",
    )
    version = SimpleNamespace(cuda="13.0" if built else None)
    return SimpleNamespace(__version__="2.13.0", cuda=cuda, version=version)


@pytest.mark.parametrize(
    ("of_torch", "found", "has_gpu", "status", "words"),
    [
        (torch(), native(), True, "ok", ""),
        (torch(devices=2), native(devices=1), True, "wrong", "update the NVIDIA driver"),
        (torch(), native(has_cuda=False), True, "note", "CPR_EXT_CUDA=ON"),
        (torch(devices=0), native(), True, "note", "NVIDIA driver"),
        (torch(devices=0), native(), False, "ok", ""),
        (torch(built=False, devices=0), native(), True, "note", "a torch with CUDA"),
    ],
)
def test_cuda(monkeypatch, of_torch, found, has_gpu, status, words):
    monkeypatch.setitem(sys.modules, "torch", of_torch)
    monkeypatch.setitem(sys.modules, "cpr_ext._native", found)
    monkeypatch.setattr(doctor.Path, "exists", lambda path: has_gpu)
    check = doctor.check_cuda()
    assert (check.status, words in check.remedy) == (status, True)
    assert bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("refused", "status", "words"),
    [
        (None, "ok", "GB free; direct I/O"),
        (errno.EINVAL, "note", "no direct I/O, the page cache"),
        (errno.ENOSPC, "wrong", "cannot be written: No space left on device"),
    ],
)
def test_direct_io_is_tried(tmp_path, monkeypatch, refused, status, words):
    open_file = os.open

    def open_or_refuse(name, flags, *more, **named):
        if flags & os.O_DIRECT:
            if refused is not None:
                raise OSError(refused, os.strerror(refused))
            flags &= ~os.O_DIRECT  # whatever the disk of this test takes
        return open_file(name, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_or_refuse)
    check = doctor.check_disk(tmp_path)
    assert (check.status, words in check.found) == (status, True)
    assert bool(check.remedy) == (status != "ok")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    (tmp_path / "file").touch()
    for place in ("none", "file"):
        check = doctor.check_disk(tmp_path / place)
        assert (check.status, "cannot be written" in check.found) == ("wrong", True)


FOUND = {
    "click": "8.1",
    "tqdm": "4.6",
    "scipy": "1.1",
    "torchrec": doctor.TRIED_TORCHREC,
    "fbgemm-gpu-cpu": doctor.TRIED_TORCHREC,
    "torch": f"{doctor.TRIED_TORCH}.0",
}


@pytest.fixture
def installed(monkeypatch):
    versions = dict(FOUND)
    monkeypatch.setattr(doctor, "version_of", versions.get)
    monkeypatch.setattr(doctor.importlib, "import_module", lambda name: None)
    return versions


def test_missing_packages_are_named_with_their_extra(installed):
    assert doctor.check_extra("cli").status == "ok"
    del installed["scipy"]
    check = doctor.check_extra("cli")
    assert check.status == "note"
    assert check.found == "missing: scipy; found: click 8.1, tqdm 4.6"
    assert "cpr_ext[cli]" in check.remedy
    check = doctor.check_extra("train")
    assert check.found == "missing: matplotlib, pyarrow, scikit-learn"
    assert "cpr_ext[train]" in check.remedy


def test_torchrec_fits_is_missing_or_was_not_tried(installed):
    assert doctor.check_torchrec().status == "ok"
    installed["torch"] = "2.99.0"
    assert doctor.check_torchrec().status == "note"
    del installed["torchrec"]
    check = doctor.check_torchrec()
    assert (check.status, "not installed" in check.found) == ("ok", True)


def test_a_torchrec_that_cannot_be_imported_is_wrong(installed, monkeypatch):
    def fail(name):
        raise OSError("undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    check = doctor.check_torchrec()
    assert check.status == "wrong"
    assert check.found.endswith("cannot be imported: undefined symbol: _ZN3c10")
    assert "--no-deps torchrec==" in check.remedy


def test_a_torch_without_the_private_names_is_noted(monkeypatch):
    assert doctor.check_live_recovery().status == "ok"
    private = importlib.import_module("cpr_ext.distributed.collective.torch_private")

    def refuse():
        raise UsageError("torch 9.9 lacks _ddp_init_helper")

    monkeypatch.setattr(private, "require_known_torch", refuse)
    check = doctor.check_live_recovery()
    assert (check.status, check.found) == ("note", "torch 9.9 lacks _ddp_init_helper")
