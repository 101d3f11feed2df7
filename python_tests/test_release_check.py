"""tools/release_check.py: what was not done, or differs, is never called ok."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "tools/release_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["release_check"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("release_check")


def states(outcomes):
    return [outcome.state for outcome in outcomes]


def test_the_version_is_one_in_every_place(tool):
    agreed, _, tag = tool.versions(ROOT)
    assert agreed.state == tool.OK, agreed
    assert tag.state in (tool.OK, tool.NOT_DONE)


def test_a_version_that_differs_is_a_failure(tool, tmp_path):
    for name in ("pyproject.toml", "cpr_ext/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    text = (tmp_path / "CITATION.cff").read_text()
    (tmp_path / "CITATION.cff").write_text(text.replace("version: 0", "version: 7"))
    assert tool.versions(tmp_path)[0].state == tool.FAILED


@pytest.mark.parametrize("second", [None, b"other"])
def test_another_build_of_other_bits_or_none_is_a_failure(tool, tmp_path, second):
    for folder, content in (("a", b"bits"), ("b", second)):
        (tmp_path / folder).mkdir()
        if content is not None:
            (tmp_path / folder / "cpr_ext-1.tar.gz").write_bytes(content)
    assert states(tool.equal_bits(tmp_path / "a", tmp_path / "b")) == [tool.FAILED]
    assert states(tool.equal_bits(tmp_path / "a", tmp_path / "a")) == [tool.OK]


def test_nothing_built_is_a_failure(tool, tmp_path):
    assert states(tool.equal_bits(tmp_path, tmp_path)) == [tool.FAILED]


def test_each_wheel_of_the_release_that_is_not_there_is_named(tool, tmp_path):
    (tmp_path / "cpr_ext-0.1.0-cp311-cp311-manylinux_2_35_x86_64.whl").write_text("")
    found = tool.missing_wheels(tmp_path)
    assert [outcome.what for outcome in found if outcome.state == tool.OK] == [
        "wheel of Python 3.11 for x86_64"
    ]
    assert states(found).count(tool.NOT_DONE) == len(tool.PYTHONS) * len(tool.ARCHS) - 1
    assert "release.yml" in str(found[0])


def test_an_environment_without_its_wheel_is_a_failure(tool, tmp_path):
    assert states(tool.tried(tmp_path, sys.executable, "2.4.0", None, tmp_path / "env")) == [
        tool.FAILED
    ]
