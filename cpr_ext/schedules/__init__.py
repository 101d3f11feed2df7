"""When a snapshot is due."""

from cpr_ext.schedules.intervals import (
    Continuous,
    EverySeconds,
    EverySteps,
    Progress,
    RunCosts,
    Schedule,
)

__all__ = ["Continuous", "EverySeconds", "EverySteps", "Progress", "RunCosts", "Schedule"]
