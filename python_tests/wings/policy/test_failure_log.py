"""The MTBF of a log, censored jobs counted in; what a log cannot tell is said."""

import sys

import numpy as np
import pytest

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.policy.failure_log import FailureLog, fit_failures, read_failure_log


def test_the_interval_holds_as_often_as_it_says():
    """Jobs that end after 5 to 90 h, if they do not fail before."""
    rng, held = np.random.default_rng(5), []
    for _ in range(400):
        times, ends = rng.exponential(28, 60), rng.uniform(5, 90, 60)
        fit = fit_failures(FailureLog(np.minimum(times, ends), times <= ends))
        held.append(fit.low_hours <= 28 <= fit.high_hours)
    assert np.mean(held) == pytest.approx(0.95, abs=0.035)


def test_a_csv_is_read_with_its_censored_jobs_and_scaled_to_the_planned_nodes(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("job, hours ,failed,nodes\na,10,1,16\nb, 20 , 0 ,8\nc,5.5,1,32\n")
    log = read_failure_log(path, nodes=16)
    assert log.hours.tolist() == [10, 10, 11]
    assert log.failed.tolist() == [True, False, True]
    with pytest.raises(UsageError, match="jobs on 8 to 32 nodes; say on how many"):
        read_failure_log(path)
    path.write_text("hours\n3\n4\n")
    assert read_failure_log(path).failed.tolist() == [True, True]
    with pytest.raises(UsageError, match="no column 'nodes'"):
        read_failure_log(path, nodes=16)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no column 'hours'"),
        ("time,failed\n1,1\n", r"no column 'hours' but \['time', 'failed'\]"),
        ("hours,failed\n", "holds no job"),
        ("hours,failed\n1,1\n-2,1\n", "line 3: hours is '-2'"),
        ("hours,failed\n1,perhaps\n", "line 2: failed is 'perhaps'"),
        ("hours,failed\n1\n", "line 2: failed is ''"),
        ("hours,nodes\n1,0\n", "line 2: nodes is '0'"),
        ("hours\nnan\n", "line 2: hours is 'nan'"),
    ],
)
def test_a_csv_that_cannot_be_read_is_refused_with_the_line(tmp_path, text, why):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=why):
        read_failure_log(path)


def test_what_tells_no_mtbf_is_refused_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "binary.csv").write_bytes(b"hours\n\xff\xfe\x00")
    for name, why in (("absent", r"absent.csv' cannot be read"), ("binary", "cannot be read")):
        with pytest.raises(DataError, match=why):
            read_failure_log(tmp_path / f"{name}.csv")
    log = FailureLog(np.array([100.0, 200.0]), np.array([False, False]))
    with pytest.raises(DataError, match=r"no failure in 300 hours.*above 100 hours with 95 %"):
        fit_failures(log)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UsageError, match=r"needs scipy: pip install 'cpr_ext\[cli\]'"):
        fit_failures(FailureLog(np.ones(2), np.ones(2, bool)))
