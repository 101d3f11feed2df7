"""The paper's mathematics, pure functions: what a failure costs.

Hours are hours, bytes are bytes; every name says which. Nothing here needs torch.
"""

from __future__ import annotations

from cpr_ext.wings.policy.costs import JobCosts, JobSize, SavePattern
from cpr_ext.wings.policy.expectation import (
    Overhead,
    full_recovery,
    partial_recovery,
    young_interval_hours,
)
from cpr_ext.wings.policy.failure_log import FailureFit, FailureLog, fit_failures, read_failure_log
from cpr_ext.wings.policy.parity import ParityCosts
from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.pls import (
    RunningPLS,
    exact_expected_pls,
    expected_pls,
    interval_for_pls,
    portion_of_lost_samples,
)
from cpr_ext.wings.policy.strategy import Plan, Strategy

__all__ = [
    "FailureFit",
    "FailureLog",
    "JobCosts",
    "JobSize",
    "Overhead",
    "ParityCosts",
    "Plan",
    "Planner",
    "RunningPLS",
    "SavePattern",
    "Strategy",
    "exact_expected_pls",
    "expected_pls",
    "fit_failures",
    "full_recovery",
    "interval_for_pls",
    "partial_recovery",
    "portion_of_lost_samples",
    "read_failure_log",
    "young_interval_hours",
]
