"""CPR: checkpointing with partial recovery for recommendation models.

>>> ckpt = cpr_ext.Checkpointer(model, optimizer, "runs/a/store")
>>> report = ckpt.recover()
>>> for step, batch in enumerate(loader, report.step):
...     train_step(model, batch)
...     ckpt.step(len(batch))
>>> ckpt.close()
"""

from cpr_ext.checkpointer import Checkpointer
from cpr_ext.errors import CprError
from cpr_ext.priorities import AllRows, LargestChange, MostFrequentlyUsed, SubSampledUsed
from cpr_ext.recovery import RecoveryReport
from cpr_ext.retention import Retention
from cpr_ext.schedules import EverySeconds, EverySteps

__all__ = [
    "AllRows",
    "Checkpointer",
    "CprError",
    "EverySeconds",
    "EverySteps",
    "LargestChange",
    "MostFrequentlyUsed",
    "RecoveryReport",
    "Retention",
    "SubSampledUsed",
]

__version__ = "0.1.0"
