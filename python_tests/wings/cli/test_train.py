"""The command ``cpr train``: in a process of its own where that matters, else in this one."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from python_tests import preloaded
from python_tests.helpers import committed_steps, on_devices

USAGE, OTHER = 2, 1  # exit codes
QUICK = ["--quiet", "--steps", "60", "--every-steps", "20"]


def cpr_process(*arguments):
    return preloaded.run(["-m", "cpr_ext.wings.cli", *arguments], timeout=120)


def test_a_run_reports_every_promised_figure(tmp_path):
    picture = tmp_path / "run.png"
    quick = [option for option in QUICK if option != "--quiet"]  # the bar is on stderr
    run = cpr_process(
        *("train", *quick, "--fail-at", "30:1+2", "--fail-at", "50:7"),
        *("--json", "--plot", picture),
    )
    assert run.returncode == 0, run.stderr
    assert "step 30: lost shards 1, 2; recovery partial" in run.stderr
    result = json.loads(run.stdout)
    assert (0 < result["auc"] < 1, result["logloss"] > 0) == (True, True)
    assert result["samples"] == 60 * 128
    # The first, and the trained model; after steps 21 and 41.
    assert (result["snapshots"]["base"], result["snapshots"]["partial"]) == (2, 2)
    # Two shards, and one, nine steps since the snapshot.
    assert [each["samples_lost"] for each in result["failures"]] == [2 * 9 * 128, 9 * 128]
    assert result["pls"] == pytest.approx((2 * 9 + 9) * 128 / (60 * 128 * 8))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_told_with_the_remedy(cpr):
    status, _, error = cpr("train", *QUICK, "--device", "cuda:0")
    assert status == USAGE
    assert "device is 'cuda:0', but PyTorch" in error
    assert "use device cpu" in error


@pytest.mark.gpu
def test_a_run_on_a_gpu_goes_on_on_the_cpu(tmp_path):
    options = ("train", "--quiet", "--every-steps", "20", "--store", tmp_path / "s")
    first = cpr_process(*options, "--steps", "60", "--device", "cuda", "--fail-at", "30:1+2")
    assert first.returncode == 0, first.stderr
    second = cpr_process(*options, "--steps", "80", "--device", "cpu", "--json")
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout)["resumed_from_step"] == 60


def test_a_run_without_snapshots_and_one_that_is_continued(cpr, tmp_path):
    store = tmp_path / "store"
    status, shown, error = cpr("train", *QUICK, "--priority", "none", "--store", store)
    assert status == 0, error
    assert "0 base, 0 partial" in shown
    assert not store.exists()
    assert cpr("train", *QUICK, "--priority", "ssu", "--store", store)[0] == 0
    before = {path: path.read_bytes() for path in store.rglob("*.*") if path.is_file()}
    status, _, error = cpr("train", *QUICK, "--store", store, "--seed", 5)
    assert status == USAGE
    assert "seed was 0, now 5" in error
    assert {path: path.read_bytes() for path in before} == before
    _, again, _ = cpr("train", "--quiet", "--priority", "ssu", "--steps", 90, "--store", store)
    assert "90 steps, continued from step 60" in again


@on_devices
def test_a_run_killed_at_any_moment_is_continued_from_its_store(tmp_path, device):
    """On the CPU, wherever it was killed."""
    store = tmp_path / "store"
    command = ["-m", "cpr_ext.wings.cli", "train", "--quiet", "--device", device]
    command += ["--steps", "1200", "--every-steps", "10", "--store", str(store)]
    printed = (tmp_path / "printed").open("w")
    for kill in range(3):
        process = preloaded.Process(command, stdout=printed, stderr=printed)
        before = committed_steps(store)
        deadline = time.monotonic() + 60
        while committed_steps(store) in ([], before):
            assert time.monotonic() < deadline, "no snapshot was committed"
            assert process.poll() is None, (tmp_path / "printed").read_text()
            time.sleep(0.002)
        time.sleep(0.03 * kill)
        process.kill()
        assert process.returncode == -signal.SIGKILL
        committed = committed_steps(store)[-1]
        assert committed >= 1
    run = cpr_process("train", "--quiet", "--steps", committed + 20, "--store", store)
    assert run.returncode == 0, run.stderr
    assert f"{committed + 20:,} steps, continued from step {committed:,}" in run.stdout


def test_an_auc_that_is_not_defined_is_null_and_explained(cpr, tmp_path):
    log = tmp_path / "train.txt"  # too short for a block of test samples
    log.write_text(("1" + "\t1" * 13 + "\ta" * 26 + "\n") * 100)
    status, output, error = cpr("train", "--quiet", "--json", "--data", f"criteo:{log}")
    assert status == 0, error
    assert json.loads(output)["auc"] is None
    assert "NaN" not in output
    assert "Warning: the AUC is not defined" in error


def test_help_teaches_and_does_not_wait_for_torch():
    program = (
        "import sys; sys.argv = ['cpr', 'train', '--help']\n"
        "from cpr_ext.wings.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "False"
    assert "Examples:" in run.stdout
    assert "--fail-at STEP:SHARD[+SHARD...]" in run.stdout
