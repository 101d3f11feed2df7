"""The paper's mathematics, pure functions: what a failure costs."""

from cpr_ext.policy.pls import portion_of_lost_samples

__all__ = ["portion_of_lost_samples"]
