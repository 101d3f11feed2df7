import json

import pytest


def test_bench_measures_judges_and_leaves_nothing_behind(cpr, tmp_path):
    code, out, _ = cpr("bench", tmp_path, "--size-mb", 2)
    assert code == 0
    for line in ("direct I/O", "plain write, synced", "save, checksums", "longest pause"):
        assert line in out
    assert "Tables of 10.0 GB, 12.5 % of the rows every 60 s" in out
    assert list(tmp_path.iterdir()) == []


def test_bench_tells_when_the_disk_is_too_slow_for_the_interval(cpr, tmp_path):
    arguments = ("--size-mb", 2, "--model-gb", 1e6, "--every-seconds", 1, "--fraction", 0.5)
    code, out, _ = cpr("bench", tmp_path, *arguments, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["snapshot_bytes"] == 0.5 * found["model_bytes"] == 5e14
    assert found["snapshot_seconds"] == pytest.approx(5e14 / found["save"])
    assert found["base_seconds"] == pytest.approx(1e15 / found["save"])
    assert found["recover_seconds"] == pytest.approx(1e15 / found["recover"])
    assert found["count_seconds"] > 0
    assert any("longer than the interval of 1 s" in sentence for sentence in found["advice"])
    code, out, _ = cpr("bench", tmp_path, *arguments)
    assert "longer than the interval of 1 s" in out
    assert "sound" not in out


def test_bench_refuses_a_folder_that_is_not_there(cpr, tmp_path):
    code, _, error = cpr("bench", tmp_path / "nowhere")
    assert code == 2
    assert "does not exist" in error
