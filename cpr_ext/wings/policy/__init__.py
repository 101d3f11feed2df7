"""The paper's mathematics, pure functions: what a failure costs.

Hours are hours, bytes are bytes; every name says which. Nothing here needs torch.
"""

from __future__ import annotations

from cpr_ext.wings.policy.costs import JobCosts, JobSize, SavePattern, StateBytes
from cpr_ext.wings.policy.failure_log import FailureLog, read_failure_log, times_to_failure
from cpr_ext.wings.policy.failure_models import (
    EmpiricalFailures,
    ExponentialFailures,
    FailureModel,
    GammaFailures,
    draw_failure_times,
)
from cpr_ext.wings.policy.fitting import FailureFit, fit_failures
from cpr_ext.wings.policy.overhead import (
    Overhead,
    full_recovery,
    partial_recovery,
    young_interval_hours,
)
from cpr_ext.wings.policy.parity_costs import ParityCosts
from cpr_ext.wings.policy.planner import Planner
from cpr_ext.wings.policy.pls import (
    RunningPLS,
    exact_expected_pls,
    expected_pls,
    expected_share_lost_once,
    interval_for_pls,
    portion_of_lost_samples,
)
from cpr_ext.wings.policy.precision import (
    RowSizes,
    bytes_share,
    expected_restores,
    precision_for_restores,
)
from cpr_ext.wings.policy.precision_comparison import PrecisionFigures, compare_precisions
from cpr_ext.wings.policy.strategy import Plan, Strategy

__all__ = [
    "EmpiricalFailures",
    "ExponentialFailures",
    "FailureFit",
    "FailureLog",
    "FailureModel",
    "GammaFailures",
    "JobCosts",
    "JobSize",
    "Overhead",
    "ParityCosts",
    "Plan",
    "Planner",
    "PrecisionFigures",
    "RowSizes",
    "RunningPLS",
    "SavePattern",
    "StateBytes",
    "Strategy",
    "bytes_share",
    "compare_precisions",
    "draw_failure_times",
    "exact_expected_pls",
    "expected_pls",
    "expected_restores",
    "expected_share_lost_once",
    "fit_failures",
    "full_recovery",
    "interval_for_pls",
    "partial_recovery",
    "portion_of_lost_samples",
    "precision_for_restores",
    "read_failure_log",
    "times_to_failure",
    "young_interval_hours",
]
