"""cpr_ext/distributed/job.py."""

import logging

import pytest

from cpr_ext.distributed.job import Recovery

RESUMES = "worker 1 resumes after step 7 ({} recovery, lost workers: {}, {} samples lost{})"


@pytest.mark.parametrize(
    ("recovery", "level", "text"),
    [
        (("partial", 0, (0, 1), 0, (0, 0), (0, 0), (0, 0)), "INFO", "worker 1 begins at step 0"),
        (
            ("partial", 7, (0,), 1, (64, 0), (100, 0), (5, 0)),
            *("WARNING", RESUMES.format("partial", "[0]", 64, "")),
        ),
        (
            ("partial", 7, (0, 1), 1, (0, 0), (0, 90), (0, 5)),
            "WARNING",
            RESUMES.format("partial", "[0, 1]", 0, ", rows of workers [0] start from nothing"),
        ),
        (
            ("partial", 7, (0, 1), 1, (0, 0), (90, 90), (5, 5)),
            *("INFO", RESUMES.format("partial", "[0, 1]", 0, "")),
        ),
        (
            ("exact", 7, (0,), 1, (0, 0), (0, 0), (5, 0)),
            *("INFO", RESUMES.format("exact", "[0]", 0, ", 1 steps are trained again")),
        ),
        (
            ("full", 0, (0,), 1, (64, 64), (0, 0), (0, 0)),
            *("WARNING", RESUMES.format("full", "[0]", 128, "").replace("step 7", "step 0")),
        ),
    ],
)
def test_a_recovery_is_one_line(caplog, recovery, level, text):
    caplog.set_level(logging.INFO, "cpr_ext.jobs")
    again = {"steps_repeated": 1} if recovery[0] == "exact" else {}
    Recovery(*recovery, (0.1, 0.0), **again).log(1)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [(level, text)]
