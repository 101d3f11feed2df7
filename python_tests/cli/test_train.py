"""The command ``cpr train``, as a person uses it: in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from python_tests.helpers import NEEDS_GPU, on_devices

QUICK = ["--quiet", "--steps", "60", "--every-steps", "20"]


def cpr(*arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cpr_ext.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_a_run_reports_every_promised_figure(tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    picture = tmp_path / "run.png"
    run = cpr(
        *("train", *QUICK, "--fail-at", "30:1+2", "--fail-at", "50:7"),
        *("--json", report, "--plot", picture),
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(report.read_text())
    assert 0 < result["auc"] < 1
    assert result["logloss"] > 0
    assert result["samples"] == 60 * 128
    assert result["seconds"] > 0
    assert result["samples_per_second"] > 0
    assert result["snapshots"]["base"] == 2  # the first, and the trained model
    assert result["snapshots"]["partial"] == 2  # after steps 21 and 41
    assert result["snapshots"]["bytes"] > 0
    assert 0 < result["stall_seconds"]["max"] <= result["stall_seconds"]["total"]
    first, second = result["failures"]
    assert (first["step"], first["shards"], first["recovery"]) == (30, [1, 2], "partial")
    assert first["rows_restored"] > first["rows_stale"] > 0
    assert first["samples_lost"] == 2 * 9 * 128  # two shards, nine steps since the snapshot
    assert second["samples_lost"] == 9 * 128
    assert result["pls"] == pytest.approx((2 * 9 + 9) * 128 / (60 * 128 * 8))
    assert first["seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "test AUC" in run.stdout
    assert f"{result['auc']:.4f}" in run.stdout


def test_the_same_command_gives_the_same_figures() -> None:
    first, second = (cpr("train", *QUICK, "--fail-at", "30:1").stdout for _ in range(2))
    timed = ("training time", "training blocked", "failure")
    for line, again in zip(first.splitlines(), second.splitlines(), strict=True):
        assert line.startswith(timed) or line == again


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_told_with_the_remedy() -> None:
    run = cpr("train", *QUICK, "--device", "cuda:0")
    assert run.returncode == 2
    assert "device is 'cuda:0', but PyTorch" in run.stderr
    assert "use device cpu" in run.stderr


def test_what_is_no_device_is_refused_by_name() -> None:
    run = cpr("train", *QUICK, "--device", "tpu")
    assert run.returncode == 2
    assert "device is 'tpu'; allowed: cpu, cuda, cuda:N" in run.stderr


@NEEDS_GPU
def test_a_run_on_a_gpu_goes_on_on_the_cpu(tmp_path: Path) -> None:
    options = ("train", "--quiet", "--every-steps", "20", "--store", tmp_path / "s")
    first = cpr(*options, "--steps", "60", "--device", "cuda", "--fail-at", "30:1+2")
    assert first.returncode == 0, first.stderr
    report = tmp_path / "run.json"
    second = cpr(*options, "--steps", "80", "--device", "cpu", "--json", report)
    assert second.returncode == 0, second.stderr
    assert json.loads(report.read_text())["resumed_from_step"] == 60


@pytest.mark.parametrize("priority", ["mfu", "ssu", "scar", "all"])
def test_every_priority_recovers_lost_shards(priority: str, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    run = cpr("train", *QUICK, "--priority", priority, "--fail-at", "50:0", "--json", report)
    assert run.returncode == 0, run.stderr
    (failure,) = json.loads(report.read_text())["failures"]
    assert failure["rows_restored"] > failure["rows_stale"]


def test_full_recovery_ends_where_a_run_without_failure_ends(tmp_path: Path) -> None:
    results = []
    for options in ([], ["--fail-at", "50:0+1+2", "--recovery", "full"]):
        report = tmp_path / "run.json"
        run = cpr("train", *QUICK, "--priority", "all", "--json", report, *options)
        assert run.returncode == 0, run.stderr
        results.append(json.loads(report.read_text()))
    whole, failed = results
    assert failed["auc"] == whole["auc"]
    assert failed["failures"][0]["samples_retrained"] == 9 * 128
    assert failed["pls"] == 0


def test_no_priority_saves_nothing(tmp_path: Path) -> None:
    run = cpr("train", *QUICK, "--priority", "none", "--store", tmp_path / "store")
    assert run.returncode == 0, run.stderr
    assert "0 base, 0 partial" in run.stdout
    assert not (tmp_path / "store").exists()


def test_a_finished_run_is_continued_with_more_steps(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert cpr("train", *QUICK, "--store", store).returncode == 0
    again = cpr("train", "--quiet", "--steps", 90, "--store", store)
    assert "90 steps, continued from step 60" in again.stdout


def committed_steps(manifest: Path) -> list[int]:
    """Of the snapshots that the manifest names; a new store's names none."""
    if not manifest.exists():
        return []
    return [r["last_step"] for r in json.loads(manifest.read_text())["content"]["segments"]]


@on_devices
def test_a_run_killed_at_any_moment_is_continued_from_its_store(
    tmp_path: Path, device: str
) -> None:
    """On the CPU, wherever it was killed."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "cpr_ext.cli", "train", "--quiet", "--device", device]
    command += ["--steps", "1200", "--every-steps", "10", "--store", str(store)]
    for kill in range(3):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        manifest = store / "dense" / "MANIFEST.json"
        before = committed_steps(manifest)
        deadline = time.monotonic() + 60
        while committed_steps(manifest) in ([], before):
            assert time.monotonic() < deadline, "no snapshot was committed"
            assert process.poll() is None, process.communicate()[0].decode()
            time.sleep(0.002)
        time.sleep(0.03 * kill)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        committed = committed_steps(manifest)[-1]
        assert committed >= 1
    run = cpr("train", "--quiet", "--steps", committed + 20, "--store", store)
    assert run.returncode == 0, run.stderr
    assert f"{committed + 20:,} steps, continued from step {committed:,}" in run.stdout


USAGE, OTHER = 2, 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--bogus"], USAGE, "No such option"),
        (["--fraction", "1.5"], USAGE, "fraction is 1.5; allowed: above 0, at most 1"),
        (["--fraction", "0"], USAGE, "fraction is 0.0"),
        (["--fraction", "nan"], USAGE, "fraction is nan"),
        (["--data", "movies"], USAGE, "'movies'; allowed: synthetic, criteo:PATH"),
        (["--preset", "huge"], USAGE, "'huge' is not one of"),
        (["--steps", "0"], USAGE, "--steps"),
        (["--fail-at", "10"], USAGE, "STEP:SHARD"),
        (["--fail-at", "0:1"], USAGE, "steps count from 1"),
        (["--fail-at", "10:8"], USAGE, "there is no shard 8; with 8 shards they are 0 to 7"),
        (["--fail-at", "99999:0"], USAGE, "step 99999, but the run has 1563 steps"),
        (["--priority", "none", "--fail-at", "9:0"], USAGE, "priority none saves nothing"),
        (["--json", "/nowhere/run.json"], USAGE, "the folder of '/nowhere/run.json'"),
        (["--data", "criteo:/nowhere/train.txt"], OTHER, "/nowhere/train.txt"),
        (["--data", "movietweetings:/nowhere"], OTHER, "/nowhere"),
        (["--store", "/proc/nowhere"], OTHER, "/proc/nowhere"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments: list[str], status: int, words: str) -> None:
    run = cpr("train", "--quiet", *arguments)
    assert run.returncode == status
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    run = cpr("train", *QUICK, "--store", tmp_path)
    assert run.returncode == OTHER
    assert "is not a cpr_ext store" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_store_of_another_model_or_run_is_refused_and_kept(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert cpr("train", *QUICK, "--store", store).returncode == 0
    before = {path: path.read_bytes() for path in store.rglob("*.*") if path.is_file()}
    other_shards = cpr("train", *QUICK, "--store", store, "--shards", 4)
    assert other_shards.returncode == OTHER
    assert "it has 8 shards, not 4" in other_shards.stderr
    other_seed = cpr("train", *QUICK, "--store", store, "--seed", 5)
    assert other_seed.returncode == USAGE
    assert "seed was 0, now 5" in other_seed.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_help_teaches_and_does_not_wait_for_torch() -> None:
    program = (
        "import sys; sys.argv = ['cpr', 'train', '--help']\n"
        "from cpr_ext.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "False"
    assert "Examples:" in run.stdout
    assert "--fail-at STEP:SHARD[+SHARD...]" in run.stdout
