"""The markers of python_tests/conftest.py: which tests must have ``gpu`` and when it skips them,
which tests get ``emulated``."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cpr_ext._native import native
from python_tests import conftest


def item(*markers, fixtures=(), **params):
    """As pytest makes one; ``added`` are markers that it gets later."""
    added = []
    return SimpleNamespace(
        nodeid="test_x",
        callspec=SimpleNamespace(params=params) if params else None,
        fixturenames=[*fixtures, *params],
        get_closest_marker=lambda name: name if name in markers else None,
        add_marker=added.append,
        added=added,
    )


def test_a_test_with_the_backend_cuda_must_have_the_marker():
    for place in ("cuda", ("cuda", "DirtyRows")):
        with pytest.raises(pytest.UsageError, match="test_x runs on a GPU without the marker"):
            conftest.pytest_itemcollected(item(place=place))
        conftest.pytest_itemcollected(item("gpu", place=place))


@pytest.mark.parametrize("value", ["cudaMalloc", "emulated", ["cuda"], 3, np.arange(3)])
def test_the_name_of_a_call_is_no_backend(value):
    conftest.pytest_itemcollected(item(call=value))
    conftest.pytest_itemcollected(item())


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (item(backend="emulated"), ["emulated"]),
        (item(place=("emulated", "DirtyRows")), ["emulated"]),
        (item(fixtures=["tmp_path", "emulated"], call="cudaMalloc"), ["emulated"]),
        (item(fixtures=["tmp_path"], place=("cpu", "DirtyRows")), []),
        (item("gpu", place="cuda"), []),
    ],
    ids=["parameter", "part of a parameter", "fixture", "neither", "gpu"],
)
def test_a_test_with_the_emulated_device_gets_its_marker(given, added):
    conftest.pytest_itemcollected(given)
    assert given.added == added


def test_without_a_gpu_tests_that_need_one_are_skipped_and_no_others(monkeypatch):
    monkeypatch.delenv("CPR_EXT_GPU", raising=False)
    monkeypatch.setattr(native, "num_devices", lambda: 0)
    conftest.pytest_runtest_setup(item())
    with pytest.raises(pytest.skip.Exception, match="needs a GPU: "):
        conftest.pytest_runtest_setup(item("gpu"))
    monkeypatch.setenv("CPR_EXT_GPU", "emulated")
    conftest.pytest_runtest_setup(item("gpu"))


@pytest.mark.parametrize(
    ("given", "markers", "outcome"),
    [
        ("required", ["gpu"], "failed"),
        ("required", [], "skipped"),
        ("", ["gpu"], "skipped"),
    ],
)
def test_where_a_gpu_is_required_a_skipped_test_of_one_has_failed(
    monkeypatch, given, markers, outcome
):
    monkeypatch.setenv("CPR_EXT_GPU", given)
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("f.py", 3, "why"))
    hook = conftest.pytest_runtest_makereport(item(*markers))
    next(hook)
    with pytest.raises(StopIteration) as done:
        hook.send(report)
    assert done.value.value.outcome == outcome
    assert "why" in str(report.longrepr)


def test_missing_data_is_a_failure_and_no_skip(tmp_path):
    data = Path(conftest.__file__).parent / "data" / "movietweetings"
    assert conftest.whole_data_set(data) == data
    assert "MIT License" in (data / "LICENSE").read_text()
    with pytest.raises(pytest.fail.Exception, match=r"ratings\.dat\.gz is missing; restore"):
        conftest.whole_data_set(tmp_path)
