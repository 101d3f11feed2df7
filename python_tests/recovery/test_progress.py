"""cpr_ext/recovery/restore.py."""

import logging

import pytest

from cpr_ext.recovery import restore


@pytest.fixture
def clock(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(restore.time, "monotonic", lambda: clock[0])
    return clock


def test_a_line_every_ten_seconds_says_how_much_is_read_and_how_long_it_takes(clock, caplog):
    caplog.set_level(logging.INFO, "cpr_ext.recovery")
    note = restore.RecoveryProgress(80_000_000_000)
    for clock[0], bytes_read in [
        (109.9, 15_000_000_000),
        (110.0, 16_000_000_000),
        (119.9, 39_000_000_000),
        (120.0, 40_000_000_000),
    ]:
        note(bytes_read)
    assert caplog.messages == [
        "recovering: 16.0 of 80.0 GB are read, 1.60 GB/s, about 40 s to go",
        "recovering: 40.0 of 80.0 GB are read, 2.00 GB/s, about 20 s to go",
    ]


def test_what_is_read_twice_does_not_count_as_left(clock, caplog):
    caplog.set_level(logging.INFO, "cpr_ext.recovery")
    note = restore.RecoveryProgress(1_000_000_000)
    clock[0] = 110.0
    note(1_500_000_000)
    assert caplog.messages[0].endswith("about 0 s to go")
