"""Modules that the documents named before they moved: still found, with a warning."""

import subprocess
import sys

import pytest
import torch

import cpr_ext


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(("module", "name"), [("retention", "Retention"), ("tables", "Table")])
def test_an_old_place_has_the_same_names_and_says_what_to_use(module, name):
    printed = run_python(
        f"import cpr_ext\nfrom cpr_ext.{module} import {name}\nprint({name} is cpr_ext.{name})"
    )
    assert printed.startswith("True\n")
    assert f"<string>:2: DeprecationWarning: cpr_ext.{module} will be removed; use" in printed
    assert f"cpr_ext.{name}" in printed


def test_other_modules_are_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"cpr_ext\.retained"):
        __import__("cpr_ext.retained")


def test_the_library_itself_uses_no_old_place():
    assert "DeprecationWarning: cpr_ext" not in run_python(
        "import cpr_ext, cpr_ext.cli.app, cpr_ext.distributed.worker, cpr_ext.maintenance\n"
        "[getattr(cpr_ext, name) for name in cpr_ext.__all__]"
    )


def test_the_finder_is_there_once():
    from cpr_ext.runtime.old_names import find_old_names

    before = list(sys.meta_path)
    find_old_names()
    assert sys.meta_path == before
    assert cpr_ext.__all__


def test_a_method_with_an_old_name_calls_the_new_one_and_says_so():
    table = cpr_ext.Table("a", torch.zeros(3, 2))
    with pytest.warns(
        DeprecationWarning, match=r"Table.untouched_rows_keep_still\(\) will be"
    ) as w:
        assert table.untouched_rows_keep_still() == table.updates_only_looked_up_rows()
    assert w[0].filename == __file__
    assert str(w[0].message).endswith("; use updates_only_looked_up_rows()")
