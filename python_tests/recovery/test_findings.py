"""Findings add up over shards; the report is built from them once."""

from dataclasses import fields
from pathlib import Path

import torch

from cpr_ext.errors import DamageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.report import DamagedSegment, RecoveryReport
from cpr_ext.storage.retries import UnreadableError


def test_findings_add_up_over_shards():
    findings = Findings()
    for rows in ([1, 2], [7]):
        findings.add_older("t", torch.tensor(rows), torch.tensor([3] * len(rows)))
        findings.add_missing("t", torch.tensor(rows) + 10)
    assert findings.older_rows["t"].row_ids.tolist() == [1, 2, 7]
    assert findings.missing_rows["t"].tolist() == [11, 12, 17]
    assert (findings.rows_stale, findings.rows_missing) == (3, 3)
    assert sorted(findings.not_newest("t").tolist()) == [1, 2, 7, 11, 12, 17]


def test_tables_without_older_or_missing_rows_are_left_out():
    findings = Findings()
    none = torch.empty(0, dtype=torch.int64)
    findings.add_older("t", none, none)
    findings.add_missing("t", none)
    assert (findings.older_rows, findings.missing_rows) == ({}, {})
    assert findings.not_newest("t").tolist() == []


def test_an_unknown_count_stays_unknown():
    findings = Findings(rows_stale=None)
    findings.add_stale(3)
    assert findings.rows_stale is None
    for count in (2, 3):
        findings.add_lost_updates(count)
    assert findings.row_updates_lost == 5
    for count in (None, 4):
        findings.add_lost_updates(count)
        assert findings.row_updates_lost is None


def test_damage_and_refused_reads_are_told_apart():
    findings = Findings()
    findings.add_damaged(Path("a"), DamageError("bad"), 4)
    findings.add_damaged(Path("b"), UnreadableError("no"))
    assert findings.damaged_segments == [
        DamagedSegment(Path("a"), "bad", 4, is_unreadable=False),
        DamagedSegment(Path("b"), "no", -1, is_unreadable=True),
    ]


def test_the_report_has_every_number_of_the_findings():
    values = {field.name: object() for field in fields(Findings)}
    report = Findings(**values).report()
    assert vars(report) == values
    assert [field.name for field in fields(report)] == list(values)
    assert vars(Findings().report()) == vars(RecoveryReport())


def test_a_report_does_not_change_with_later_findings():
    extra = {"epoch": 1}
    findings = Findings(extra_state=extra)
    findings.add_missing("t", torch.tensor([1]))
    report = findings.report()
    findings.add_missing("u", torch.tensor([2]))
    findings.add_damaged(Path("a"), DamageError("bad"))
    findings.differences.append("another")
    assert list(report.missing_rows) == ["t"]
    assert (report.rows_missing, report.damaged_segments, report.differences) == (1, [], [])
    assert report.extra_state is extra
