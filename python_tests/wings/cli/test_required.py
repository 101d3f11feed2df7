"""Optional packages: which commands need none, and how a missing one is named before the work."""

import importlib
import sys
from importlib.machinery import PathFinder

import pytest

OPTIONAL = (
    *("matplotlib", "pyarrow", "sklearn", "scipy", "pandas", "safetensors", "torchrec"),
    "fbgemm_gpu",
)


@pytest.fixture
def blocked(monkeypatch):
    """Nothing of the optional packages is installed, nor was any imported before."""
    find_spec = PathFinder.find_spec

    def find_others(name, path=None, target=None):
        return None if name.partition(".")[0] in OPTIONAL else find_spec(name, path, target)

    monkeypatch.setattr(PathFinder, "find_spec", find_others)
    for name in [name for name in sys.modules if name.partition(".")[0] in OPTIONAL]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("matplotlib")


@pytest.mark.usefixtures("blocked")
def test_tools_and_plans_need_no_plotting_or_data_libraries(cpr, store, tmp_path):
    job = ("--job-hours", 100, "--shards", 8, "--mtbf-hours", 25, "--save-minutes", 4)
    for command in (
        ("inspect", store),
        ("inspect", store, "--json"),
        ("verify", store),
        ("export", store, tmp_path / "out"),
        ("export", store, tmp_path / "out_torch", "--format", "torch"),
        ("repair", store),
        ("plan", "--preset", "abstract-56h", "--json"),
        ("plan", *job, "--load-minutes", 2),
    ):
        code, _, error = cpr(*command)
        assert code == 0, (command, error)


@pytest.mark.parametrize(
    ("command", "missing", "words"),
    [
        ("train", "sklearn", "cpr train needs scikit-learn: pip install 'cpr_ext[train]'"),
        ("train --data criteo:x", "sklearn pyarrow", "cpr train needs scikit-learn, pyarrow: pip"),
        ("train --plot x.png", "matplotlib", "cpr train --plot needs matplotlib: pip"),
        ("emulate", "sklearn", "cpr emulate needs scikit-learn: pip install"),
        ("emulate --plot x.png", "matplotlib", "cpr emulate --plot needs matplotlib: pip"),
    ],
)
def test_a_missing_package_is_named_before_the_work(
    cpr, tmp_path, monkeypatch, command, missing, words
):
    monkeypatch.chdir(tmp_path)
    for module in missing.split():
        monkeypatch.setitem(sys.modules, module, None)
    code, output, error = cpr(*command.split())
    assert (code, output) == (2, "")
    assert words in error
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_was_never_installed_is_missing(cpr, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, error = cpr("train")
    assert (code, "needs scikit-learn" in error) == (2, True)
