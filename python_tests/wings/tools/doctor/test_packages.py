"""Checks of optional packages: each missing or unfit one is named with its remedy."""

import importlib

import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.tools.doctor import packages

FOUND = {
    "click": "8.1",
    "tqdm": "4.6",
    "scipy": "1.1",
    "torchrec": packages.TRIED_TORCHREC,
    "fbgemm-gpu-cpu": packages.TRIED_TORCHREC,
    "torch": f"{packages.TRIED_TORCH}.0",
}


@pytest.fixture
def installed(monkeypatch):
    versions = dict(FOUND)
    monkeypatch.setattr(packages, "version_of", versions.get)
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: None)
    return versions


def test_missing_packages_are_named_with_their_extra(installed):
    assert packages.check_commands().status == "ok"
    del installed["scipy"]
    check = packages.check_commands()
    assert check.status == "note"
    assert check.found == "missing: scipy; found: click 8.1, tqdm 4.6"
    assert "cpr_ext[cli]" in check.remedy
    check = packages.check_training()
    assert check.found == "missing: matplotlib, pyarrow, scikit-learn"
    assert "cpr_ext[train]" in check.remedy


def test_torchrec_fits_is_missing_or_was_not_tried(installed):
    assert packages.check_torchrec().status == "ok"
    installed["torch"] = "2.99.0"
    assert packages.check_torchrec().status == "note"
    del installed["torchrec"]
    check = packages.check_torchrec()
    assert (check.status, "not installed" in check.found) == ("ok", True)


def test_a_torchrec_that_cannot_be_imported_is_wrong(installed, monkeypatch):
    def fail(name):
        raise OSError("undefined symbol: _ZN3c10\nmore")

    monkeypatch.setattr(packages.importlib, "import_module", fail)
    check = packages.check_torchrec()
    assert check.status == "wrong"
    assert check.found.endswith("cannot be imported: undefined symbol: _ZN3c10")
    assert "--no-deps torchrec==" in check.remedy


def test_a_torch_without_the_private_names_is_noted(monkeypatch):
    assert packages.check_live_recovery().status == "ok"
    private = importlib.import_module("cpr_ext.distributed.collective.torch_private")

    def refuse():
        raise UsageError("torch 9.9 lacks _ddp_init_helper")

    monkeypatch.setattr(private, "require_known_torch", refuse)
    check = packages.check_live_recovery()
    assert (check.status, check.found) == ("note", "torch 9.9 lacks _ddp_init_helper")
