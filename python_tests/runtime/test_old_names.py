"""Old names of modules and methods still work, with a warning."""

import importlib
import subprocess
import sys

import pytest
import torch

import cpr_ext
from cpr_ext.distributed import ReformableGroup
from cpr_ext.errors import old_method


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


def test_an_old_method_calls_the_new_one_and_says_so():
    class Lamp:
        def switch_on(self, seconds: int, *, bright: bool = False) -> str:
            """Shine."""
            return f"{seconds} {bright}"

        light = old_method("light", "switch_on")

    with pytest.warns(DeprecationWarning, match=r"Lamp\.light\(\) .*; use switch_on\(\)") as seen:
        assert Lamp().light(3, bright=True) == "3 True"
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("owner", "old", "new"),
    [
        (cpr_ext.Checkpointer, "shared_part", "replicated_state"),
        (cpr_ext.Checkpointer, "take_over", "load_replicated_state"),
        (cpr_ext.Table, "untouched_rows_keep_still", "updates_only_looked_up_rows"),
        (ReformableGroup, "reform", "configure"),
        (ReformableGroup, "dissolve", "abort"),
    ],
)
def test_old_methods_name_methods_that_exist(owner, old, new):
    assert callable(getattr(owner, new))
    assert new in getattr(owner, old).__doc__


@pytest.mark.parametrize(
    ("room", "old", "new"), [("policy", "Job", "JobSize"), ("dlrm", "Preset", "ModelPreset")]
)
def test_an_old_class_name_is_the_new_class(room, old, new):
    module = importlib.import_module(f"cpr_ext.{room}")
    with pytest.warns(DeprecationWarning, match=f"{room}.{old} .* use cpr_ext.{room}.{new}"):
        assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_a_method_with_an_old_name_calls_the_new_one_and_says_so():
    table = cpr_ext.Table("a", torch.zeros(3, 2))
    with pytest.warns(
        DeprecationWarning, match=r"Table.untouched_rows_keep_still\(\) will be"
    ) as w:
        assert table.untouched_rows_keep_still() == table.updates_only_looked_up_rows()
    assert w[0].filename == __file__
    assert str(w[0].message).endswith("; use updates_only_looked_up_rows()")
