"""A sample of commands on hostile stores; `make fuzz` makes 10,000 calls."""

from unittest import mock

import pytest

from cpr_ext.errors import StoreError
from python_tests.faults.damage_scene import Scene
from python_tests.faults.hostile_commands import results


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("scene"))


def test_every_call_reads_or_refuses_with_the_name_of_the_file(scene, tmp_path):
    done = list(results(scene, tmp_path / "target", 120, 7))
    assert [finding for finding, _, _ in done if finding is not None] == []
    assert {words[0] for _, words, _ in done} == {
        *("inspect", "verify", "repair", "export", "fetch", "publish")
    }
    assert {result.code for _, _, result in done} == {0, 1}


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (OverflowError("planted"), "OverflowError: planted"),
        (StoreError("planted"), "names no file: 'Error: planted"),
        (SystemExit(3), "3\n"),
    ],
    ids=["raw error", "no name", "exit code"],
)
def test_a_call_that_ends_otherwise_is_found(scene, tmp_path, planted, told):
    with mock.patch("cpr_ext.wings.tools.maintenance.verify", side_effect=planted):
        found = [f for f, _, _ in results(scene, tmp_path / "target", 40, 7) if f is not None]
    assert {finding.words[0] for finding in found} == {"verify"}
    assert all(told in finding.trouble for finding in found)
