"""The report of a recovery cannot be changed, and understands its old names."""

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from cpr_ext.recovery.report import DamagedSegment, RecoveryReport


@pytest.mark.parametrize("name", [field.name for field in fields(RecoveryReport)])
def test_no_field_of_a_report_can_be_assigned(name):
    report = RecoveryReport(step=3)
    with pytest.raises(FrozenInstanceError):
        setattr(report, name, getattr(report, name))


def test_the_old_name_of_possibly_stale_rows_warns_and_says_the_new_one():
    report = RecoveryReport(rows_possibly_stale=7)
    with pytest.warns(DeprecationWarning, match=r"rows_in_doubt .*use rows_possibly_stale"):
        assert report.rows_in_doubt == 7
    with pytest.raises(FrozenInstanceError):
        report.rows_in_doubt = 8


def test_the_old_name_is_no_field():
    report = RecoveryReport(rows_possibly_stale=7)
    assert "rows_in_doubt" not in repr(report)
    assert replace(report, step=1).rows_possibly_stale == 7


def test_unreadable_segments_are_listed_by_path():
    damaged = [DamagedSegment(Path(name), "", 1, name == "b") for name in ("a", "b")]
    assert RecoveryReport(damaged_segments=damaged).unreadable_paths == {Path("b")}
