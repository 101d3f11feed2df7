"""cpr_ext/distributed/job.py."""

import logging

import pytest

from cpr_ext.distributed.job import Recovery

START = Recovery("partial", 0, (0, 1), 0, (0, 0), (0, 0), (0, 0), (0.0, 0.0))


@pytest.mark.parametrize(
    ("recovery", "level", "text"),
    [
        (START, "INFO", "worker 1 begins at step 0"),
        (
            Recovery("partial", 7, (0,), 1, (64, 0), (100, 0), (5, 0), (0.1, 0.0)),
            "WARNING",
            "worker 1 resumes after step 7 (partial recovery, lost workers: [0], 64 samples lost)",
        ),
        (
            Recovery("exact", 7, (0,), 1, (0, 0), (0, 0), (5, 0), (0.1, 0.0), steps_repeated=1),
            "INFO",
            "worker 1 resumes after step 7 (exact recovery, lost workers: [0], 0 samples lost, "
            "1 steps are trained again)",
        ),
        (
            Recovery("partial", 7, (0, 1), 1, (0, 0), (0, 90), (0, 5), (0.0, 0.1)),
            "WARNING",
            "worker 1 resumes after step 7 (partial recovery, lost workers: [0, 1], 0 samples "
            "lost, rows of workers [0] start from nothing)",
        ),
        (
            Recovery("partial", 7, (0, 1), 1, (0, 0), (90, 90), (5, 5), (0.1, 0.1)),
            "INFO",
            "worker 1 resumes after step 7 (partial recovery, lost workers: [0, 1], 0 samples "
            "lost)",
        ),
        (
            Recovery("full", 0, (0,), 1, (64, 64), (0, 0), (0, 0), (0.0, 0.0)),
            "WARNING",
            "worker 1 resumes after step 0 (full recovery, lost workers: [0], 128 samples lost)",
        ),
    ],
)
def test_a_recovery_is_one_line(caplog, recovery, level, text):
    caplog.set_level(logging.INFO, "cpr_ext.jobs")
    recovery.log(1)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, text)]
