"""A drawn sample of ``make crash-test``, and whether it would see what it is there to see."""

import subprocess
import sys

import pytest

from python_tests.faults import interposer

_SEED = 1
# A minute of one core in all; a machine busy with other things may take many.
_TIMEOUT_SECONDS = 900
pytestmark = pytest.mark.timeout(_TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        library = interposer.build(tmp_path_factory.mktemp("library"))
    except interposer.UnavailableError as error:
        pytest.skip(str(error))
    probe = "from python_tests.faults.interposer import Interposer as I; print(I().hits)"
    done = run_preloaded(library, "-c", probe)
    if done.returncode != 0 or done.stdout.split() != ["0"]:
        pytest.skip(f"a library cannot be preloaded here: {done.stderr[-500:]}")
    return library


def run_preloaded(library, *arguments):
    """Run Python with the library loaded before everything else."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=interposer.environment(library),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )


def test_a_sample_of_faults_and_power_cuts_leaves_what_was_promised(library):
    arguments = ["-m", "python_tests.faults.crash_test", "--jobs", "1", "--reorderings", "1"]
    done = run_preloaded(library, *arguments, "--sample", "60", "--seed", str(_SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all " in done.stdout


def test_a_sample_of_faults_with_rounded_rows_leaves_what_was_promised(library):
    arguments = ["-m", "python_tests.faults.crash_test", "--jobs", "1", "--reorderings", "1"]
    done = run_preloaded(library, *arguments, "--sample", "10", "--precision", "int8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all " in done.stdout


@pytest.mark.long
def test_more_faults_with_rounded_rows_leave_what_was_promised(library):
    arguments = ["-m", "python_tests.faults.crash_test", "--jobs", "2"]
    done = run_preloaded(library, *arguments, "--sample", "1000", "--precision", "int8")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_taken_out_of_the_code_is_missed(library):
    arguments = ["-m", "python_tests.faults.teeth", "--jobs", "1", "--enough", "1"]
    done = run_preloaded(library, *arguments, "--tries", "60", "--seed", str(_SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found") >= 9


def test_a_sample_of_failing_reads_costs_no_acknowledged_state(library):
    arguments = ["-m", "python_tests.faults.read_side", "--jobs", "1"]
    done = run_preloaded(library, *arguments, "--sample", "40", "--seed", str(_SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all " in done.stdout


def test_a_reader_that_takes_failing_reads_for_damage_is_found(library):
    arguments = ["-m", "python_tests.faults.read_side", "--jobs", "1", "--teeth", "4"]
    done = run_preloaded(library, *arguments, "--seed", str(_SEED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("found") == 2


@pytest.mark.parametrize("shards", [1, 16])
def test_a_commit_costs_three_syncs_and_one_rename_beside_the_segments(library, shards):
    # The rows and the dense part; their entries, the manifest, its entry.
    done = run_preloaded(library, "-m", "python_tests.faults.commit_calls", "--shards", str(shards))
    told = dict(line.split(": ") for line in done.stdout.splitlines())
    for name in ("base", "partial 0", "partial 1", "partial 2"):
        calls = dict(reversed(each.split()) for each in told[name].split(", "))
        assert (calls["fsync"], calls["rename"]) == ("5", "1"), done.stdout
    assert told["close"] == ""


def test_a_commit_after_one_in_doubt_leaves_no_manifest_older_than_the_one_before(library):
    arguments = ["-m", "python_tests.faults.crash_test", "--replay", "EIO+cut", "fsync:store:4"]
    done = run_preloaded(library, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
