"""Checks of Python, torch and the native core, with what could be wrong put in their place."""

import sys
from types import SimpleNamespace

import pytest

import cpr_ext
from cpr_ext.wings.tools.doctor import software


def test_this_environment_is_sound():
    assert software.check_python().status in ("ok", "note")
    assert software.check_torch().status in ("ok", "note")
    check = software.check_native()
    assert (check.status, check.found.startswith(cpr_ext.__version__)) == ("ok", True)


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.3.1", "wrong"), ("2.4.0", "note"), ("2.10.0+cu128", "ok"), ("3.0", "ok")],
)
def test_a_torch_is_judged_by_its_version(monkeypatch, version, status):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=version))
    check = software.check_torch()
    assert (check.status, check.found) == (status, version)
    assert bool(check.remedy) == (status != "ok")


def test_a_torch_that_cannot_be_imported_is_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check = software.check_torch()
    assert check.status == "wrong"
    assert "torch cannot be imported" in check.found
    assert "pip install" in check.remedy


@pytest.mark.parametrize(
    ("attribute", "value", "status", "words"),
    [
        ("machine", "aarch64", "note", "portable code runs"),
        ("system", "Windows", "wrong", "use Linux"),
    ],
)
def test_other_systems(monkeypatch, attribute, value, status, words):
    monkeypatch.setattr(software.platform, attribute, lambda: value)
    check = software.check_python()
    assert (check.status, words in check.remedy) == (status, True)


def test_a_native_core_that_does_not_load_is_wrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "cpr_ext._native", None)
    check = software.check_native()
    assert check.status == "wrong"
    assert "pip install ." in check.remedy


def test_two_versions_are_noted(monkeypatch):
    monkeypatch.setattr(software, "version_of", lambda name: "0.0.9")
    check = software.check_native()
    assert check.status == "note"
    assert "pip says 0.0.9" in check.found


def test_versions_and_errors():
    assert software.version_of("no-such-package") is None
    assert software.numbers("2.13.0+cpu") == (2, 13, 0)
    assert software.numbers("main") == ()
    assert software.first_line(ValueError("a\nb")) == "a"
    assert software.first_line(ValueError()) == "ValueError"
