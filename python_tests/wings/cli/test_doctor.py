"""``cpr doctor``: lines or JSON, and the exit code."""

import json

import pytest

from cpr_ext.wings.tools import doctor
from cpr_ext.wings.tools.doctor import Check


@pytest.fixture(autouse=True)
def _no_torchrec(monkeypatch):
    monkeypatch.setattr(doctor, "check_torchrec", lambda: Check("TorchRec", "note", "old", "new"))


def test_it_shows_what_it_found_and_the_remedy(cpr, tmp_path):
    code, output, _ = cpr("doctor", tmp_path)
    assert code == 0, output
    lines = [line for line in output.splitlines() if line[:2] in ("ok", "no")]
    assert {line[20] for line in lines} == {" "}  # behind the longest name, too
    names = [line[6:20].strip() for line in lines]
    assert names == [
        *("Python", "torch", "cpr_ext", "CUDA", "disk", "cli", "train", "remote"),
        *("opentelemetry", "live recovery", "TorchRec"),
    ]
    assert "note  TorchRec       old\n                     -> new\n" in output
    assert output.endswith("\nNothing is wrong.\n")


def test_what_is_wrong_exits_1_also_as_json(cpr, tmp_path):
    code, output, _ = cpr("doctor", tmp_path / "none", "--json")
    assert code == 1
    found = json.loads(output)
    assert found["is_sound"] is False
    (wrong,) = [check for check in found["checks"] if check["status"] == "wrong"]
    assert (wrong["name"], "FOLDER" in wrong["remedy"]) == ("disk", True)
