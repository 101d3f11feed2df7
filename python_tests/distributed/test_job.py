"""cpr_ext/distributed/job.py."""

import logging

import pytest

from cpr_ext.distributed.job import Recovery

RESUMES = "worker 1 resumes after step {} ({} recovery, lost workers: {}, {} samples lost{})"
FROM_NOTHING = ", rows of workers [0] start from nothing"


@pytest.mark.parametrize(
    ("how", "step", "lost", "source", "samples", "read", "rows", "level", "samples_lost", "more"),
    [
        ("partial", 7, (0,), 1, (64, 0), (100, 0), (5, 0), "WARNING", 64, ""),
        ("partial", 7, (0, 1), 1, (0, 0), (0, 90), (0, 5), "WARNING", 0, FROM_NOTHING),
        ("partial", 7, (0, 1), 1, (0, 0), (90, 90), (5, 5), "INFO", 0, ""),
        ("exact", 7, (0,), 1, (0, 0), (0, 0), (5, 0), "INFO", 0, ", 1 steps are trained again"),
        ("full", 0, (0,), 1, (64, 64), (0, 0), (0, 0), "WARNING", 128, ""),
        ("partial", 0, (0, 1), 0, (0, 0), (0, 0), (0, 0), "INFO", None, ""),
    ],
)
def test_a_recovery_is_one_line(
    caplog, how, step, lost, source, samples, read, rows, level, samples_lost, more
):
    caplog.set_level(logging.INFO, "cpr_ext.jobs")
    again = {"steps_repeated": 1} if how == "exact" else {}
    Recovery(how, step, lost, source, samples, read, rows, (0.1, 0.0), **again).log(1)
    text = RESUMES.format(step, how, list(lost), samples_lost, more)
    text = "worker 1 begins at step 0" if samples_lost is None else text
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, text)]
