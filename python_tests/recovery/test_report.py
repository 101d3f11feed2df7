"""The report of a recovery cannot be changed, and understands its old names."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from cpr_ext.recovery.report import DamagedSegment, RecoveryReport


@pytest.mark.parametrize("name", [field.name for field in fields(RecoveryReport)])
def test_no_field_of_a_report_can_be_assigned(name):
    report = RecoveryReport(step=3)
    with pytest.raises(FrozenInstanceError):
        setattr(report, name, getattr(report, name))


def test_unreadable_segments_are_listed_by_path():
    damaged = [DamagedSegment(Path(name), "", 1, name == "b") for name in ("a", "b")]
    assert RecoveryReport(damaged_segments=damaged).unreadable_paths == {Path("b")}
