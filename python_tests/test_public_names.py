"""The public face: what can be imported, what it says of itself, and how fast it is there."""

import errno
import importlib
import inspect
from pathlib import Path

import pytest

import cpr_ext
from cpr_ext import errors
from python_tests.helpers import run_python

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_can_be_imported_and_is_listed():
    assert list(cpr_ext.__all__) == sorted(cpr_ext.__all__)
    assert len(cpr_ext.__all__) <= 34
    for name in cpr_ext.__all__:
        assert getattr(cpr_ext, name).__name__ == name
        assert name in dir(cpr_ext)
    namespace = {}
    exec("from cpr_ext import *", namespace)
    assert set(cpr_ext.__all__) <= namespace.keys()


def test_a_name_that_is_not_there_is_an_attribute_error_that_names_its_module_if_another_has_it():
    with pytest.raises(ImportError):
        exec("from cpr_ext import Chekpointer")
    for name, told in (("Chekpointer", ""), ("Worker", r"; it is in cpr_ext\.distributed")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{told}"):
            getattr(cpr_ext, name)
    for name, place in cpr_ext._ELSEWHERE.items():
        if place.startswith(("integrations.", "wings.callbacks.")):
            assert (ROOT / "cpr_ext" / place.replace(".", "/")).is_dir()
        else:
            assert name in importlib.import_module(f"cpr_ext.{place}").__all__


@pytest.mark.parametrize("module", ["cpr_ext", "cpr_ext._native", "cpr_ext._C", "cpr_ext.errors"])
def test_importing_the_core_imports_neither_torch_nor_numpy(module):
    heavy = run_python(
        f"import sys, {module}; print([m for m in ('torch', 'numpy') if m in sys.modules])",
        is_new=True,
    )
    assert heavy == "[]\n"


def test_a_public_name_brings_its_module_when_it_is_asked_for():
    printed = run_python("import cpr_ext; print(cpr_ext.EverySteps(3))")
    assert printed == "EverySteps(steps=3, when_busy='delay')\n"
    code = "from cpr_ext import CprError; import sys; print('torch' in sys.modules)"
    assert run_python(code, is_new=True) == "False\n"


def test_the_native_module_is_named_with_likely_causes_when_it_cannot_be_loaded():
    code = (
        "import sys; sys.modules['cpr_ext._C'] = None\n"
        "try:\n    import cpr_ext._native\n"
        "except ImportError as error:\n    print(error)"
    )
    message = run_python(code, is_new=True)
    assert "pip install ." in message
    assert "another Python" in message


# --- errors ---


def test_errors_have_a_common_base_and_are_pythons_own_and_an_unreadable_file_is_none_of_a_store():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(kind, UserWarning if name.endswith("Warning") else errors.CprError)
    for kind, other in (
        (errors.RowIndexError, IndexError),
        (errors.NanError, ArithmeticError),
        (errors.StorageError, OSError),
        (errors.CudaError, RuntimeError),
        (errors.DamageError, errors.StoreError),
    ):
        assert issubclass(kind, other)
    assert not issubclass(errors.StorageError, errors.StoreError)
    error = errors.StorageError(errno.ENOSPC, "cannot write 'x': the disk is full", "x")
    assert (error.errno, error.filename) == (errno.ENOSPC, "x")
    assert str(error) == "cannot write 'x': the disk is full"
    assert str(errors.StorageError("no number")) == "no number"
