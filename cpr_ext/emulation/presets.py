"""Scenarios by name."""
from cpr_ext.policy import ExponentialFailures, Job, JobCosts
from cpr_ext.emulation.scenario import Scenario

PRESETS = {
 "abstract-56h": Scenario("abstract-56h", Job(56, 8, 1), ExponentialFailures(28), JobCosts(5.3/60, 3/60, 3/60, 4/60), 0.1),
 "production-50h": Scenario("production-50h", Job(50, 18, 4), ExponentialFailures(10), JobCosts(5.3/60, 3/60, 3/60, 4/60), 0.1, num_failures=5, num_trainers=20),
}
