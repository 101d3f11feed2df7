"""Findings add up over shards; the report is built from them once."""

import torch

from cpr_ext.recovery.report import Findings


def test_findings_add_up_over_shards():
    findings = Findings()
    for rows in ([1, 2], [7]):
        findings.add_older("t", torch.tensor(rows), torch.tensor([3] * len(rows)))
        findings.add_missing("t", torch.tensor(rows) + 10)
    assert findings.older_rows["t"].row_ids.tolist() == [1, 2, 7]
    assert findings.missing_rows["t"].tolist() == [11, 12, 17]
    assert (findings.rows_stale, findings.rows_missing) == (3, 3)
    assert sorted(findings.not_newest("t").tolist()) == [1, 2, 7, 11, 12, 17]
