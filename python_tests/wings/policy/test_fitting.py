"""Fits recover what drew the log, censored jobs counted in; what a log cannot tell is said."""

import math

import numpy as np
import pytest

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.policy import EmpiricalFailures, ExponentialFailures, GammaFailures
from cpr_ext.wings.policy.failure_log import FailureLog, read_failure_log, times_to_failure
from cpr_ext.wings.policy.fitting import fit_failures, kaplan_meier


def drawn_log(model, rng, size=120):
    """Jobs that end after 5 to 90 h, if they do not fail before."""
    times, ends = model.draw(rng, size), rng.uniform(5, 90, size)
    return FailureLog(np.minimum(times, ends), times <= ends)


def test_the_exponential_fit_by_hand():
    # 3 failures in 10 + 20 + 30 + 40 h.
    log = FailureLog(np.array([10.0, 20, 30, 40]), np.array([True, True, True, False]))
    fit = fit_failures(log, "exponential")
    assert fit.model == ExponentialFailures(100 / 3)
    # chi-squared quantiles from tables: 17.535 (8 degrees of freedom), 1.237 (6).
    assert fit.mtbf_low_hours == pytest.approx(200 / 17.535, rel=1e-3)
    assert fit.mtbf_high_hours == pytest.approx(200 / 1.2373, rel=1e-3)
    assert (fit.num_failures, fit.num_censored) == (3, 1)
    assert fit.aic == pytest.approx(2 + 2 * (3 * math.log(100 / 3) + 3))


def test_the_gamma_likelihood_of_censored_jobs_is_scipys():
    from scipy import stats

    log = drawn_log(GammaFailures(2, 14), np.random.default_rng(3), 100)
    data = stats.CensoredData.right_censored(log.hours, ~log.failed)
    shape, _, scale = stats.gamma.fit(data, floc=0)
    fit = fit_failures(log, "gamma")
    assert fit.model.shape == pytest.approx(shape, rel=1e-3)
    assert fit.model.mean_hours == pytest.approx(shape * scale, rel=1e-3)


@pytest.mark.parametrize(
    ("drawn", "kind"),
    [(GammaFailures(4, 7), GammaFailures), (ExponentialFailures(28), ExponentialFailures)],
)
def test_the_simpler_model_is_taken_unless_the_log_speaks_for_the_other(drawn, kind):
    rng = np.random.default_rng(0)
    fits = [fit_failures(drawn_log(drawn, rng)) for _ in range(10)]
    assert sum(isinstance(fit.model, kind) for fit in fits) >= 8


@pytest.mark.parametrize("times", [[5.0], [5.0, 9.0], [5.0, 5.0, 5.0], [28.0] * 50])
def test_logs_too_plain_for_a_gamma_distribution_are_exponential(times):
    log = times_to_failure(times)
    assert isinstance(fit_failures(log).model, ExponentialFailures)
    with pytest.raises(DataError, match="needs at least 3"):
        fit_failures(log, "gamma")


def test_kaplan_meier_by_hand():
    # 5 jobs; at 2 h one of 5 fails, 3 h: one leaves, 4 h: one of 3 fails, 6 h: one of 2, 7 h: rest.
    log = FailureLog(np.array([4.0, 3, 2, 7, 6]), np.array([True, False, True, True, True]))
    times, weights = kaplan_meier(log)
    assert times.tolist() == [2, 4, 6, 7]
    assert weights == pytest.approx([1 / 5, 4 / 5 / 3, 8 / 15 / 2, 4 / 15])
    fit = fit_failures(log, "empirical")
    assert isinstance(fit.model, EmpiricalFailures)
    assert fit.model.mean_hours == pytest.approx(np.dot(times, weights))
    assert fit.mtbf_low_hours < fit.model.mean_hours < fit.mtbf_high_hours
    assert fit.notes == ()


def test_an_empirical_fit_says_what_the_longest_job_hides():
    log = FailureLog(np.array([2.0, 4, 8, 8]), np.array([True, True, False, False]))
    fit = fit_failures(log, "empirical")
    assert fit.model.times_hours == (2, 4, 8)
    assert fit.model.weights == pytest.approx((0.25, 0.25, 0.5))
    assert "50 % of the times to failure are longer" in fit.notes[0]


def test_a_log_without_failures_tells_the_bound_it_allows():
    log = FailureLog(np.array([100.0, 200.0]), np.array([False, False]))
    assert log.mtbf_lower_bound_hours() == pytest.approx(300 / 2.9957, rel=1e-4)
    with pytest.raises(DataError, match=r"no failure in 300 hours.*above 100 hours with 95 %"):
        fit_failures(log)


def test_the_lower_bound_holds_as_often_as_it_says():
    rng = np.random.default_rng(5)
    logs = [drawn_log(ExponentialFailures(100), rng, 10) for _ in range(400)]
    held = np.mean([log.mtbf_lower_bound_hours() <= 100 for log in logs])
    assert held == pytest.approx(0.95, abs=0.035)


def test_a_csv_is_read_with_its_censored_jobs_and_scaled_to_the_planned_nodes(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("job, hours ,failed,nodes\na,10,1,16\nb, 20 ,no,8\nc,5.5,TRUE,32\n")
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


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.csv' cannot be read"):
        read_failure_log(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"hours\n\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read_failure_log(tmp_path / "binary.csv")


def test_logs_and_options_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="at least one job"):
        times_to_failure([])
    with pytest.raises(UsageError, match=r"a job of -1.0 hours"):
        times_to_failure([1, -1])
    with pytest.raises(UsageError, match="confidence is 95"):
        fit_failures(times_to_failure([1.0]), confidence=95)
    with pytest.raises(UsageError, match="model is 'weibull'"):
        fit_failures(times_to_failure([1.0]), "weibull")


def test_without_scipy_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(UsageError, match=r"needs scipy: pip install 'cpr_ext\[cli\]'"):
        fit_failures(times_to_failure([1.0, 2.0]))
