"""A few real power cuts, where a file system of one's own can be mounted."""

import pytest

from python_tests.faults import power_cut_test
from python_tests.faults.test_crash import library, run_preloaded  # noqa: F401

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cut(library):  # noqa: F811
    def run(*arguments):
        done = run_preloaded(library, "-m", "python_tests.faults.power_cut_test", *arguments)
        if "SKIPPED" in done.stdout:
            pytest.skip(done.stdout.strip())
        assert "cuts" in done.stdout or "tries" in done.stdout, done.stdout + done.stderr
        return done

    return run


def test_what_was_promised_before_a_power_cut_is_there_after_it(cut):
    done = cut("--cuts", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_syncs_nothing_is_found(cut):
    done = cut("--teeth", "3", "--missing", "no sync at all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found in 3 of 3" in done.stdout


def test_where_no_disk_can_be_made_it_says_why_and_tries_nothing(monkeypatch, capsys):
    def refuse():
        raise power_cut_test.NoDiskError("mounting needs Linux and root")

    monkeypatch.setattr(power_cut_test, "enter_own_mounts", refuse)
    monkeypatch.setattr("sys.argv", ["power_cut_test"])
    assert power_cut_test.main() == 0
    assert "SKIPPED, no power was cut: mounting needs Linux and root" in capsys.readouterr().out
