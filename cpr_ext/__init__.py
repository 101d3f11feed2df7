"""CPR: checkpointing with partial recovery for recommendation models.

>>> ckpt = cpr_ext.Checkpointer(model, optimizer, "runs/a/store")
>>> report = ckpt.recover()
>>> for step, batch in enumerate(loader, report.step):
...     train_step(model, batch)
...     ckpt.step(len(batch))
>>> ckpt.close()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpr_ext.checkpointer.checkpointer import Checkpointer
    from cpr_ext.checkpointer.options import StagingOptions, StoreOptions
    from cpr_ext.checkpointer.recovery_calls import load_into
    from cpr_ext.errors import (
        CprError,
        DamageError,
        NanError,
        RowIndexError,
        SnapshotError,
        SnapshotFailedWarning,
        StorageError,
        StoreError,
        UntrackedChangeWarning,
        UsageError,
    )
    from cpr_ext.recovery.report import RecoveryReport
    from cpr_ext.recovery.restore import position
    from cpr_ext.saving.priorities import (
        AllRows,
        LargestChange,
        MostFrequentlyUsed,
        Priority,
        SubSampledUsed,
    )
    from cpr_ext.saving.schedules import Continuous, EverySeconds, EverySteps, Schedule
    from cpr_ext.saving.snapshot_handle import SnapshotHandle
    from cpr_ext.state.precision import Precision
    from cpr_ext.state.slot_keys import SlotKeys
    from cpr_ext.state.stateful import PerRank
    from cpr_ext.state.table import Table
    from cpr_ext.storage.retention import Retention
    from cpr_ext.wings.policy.target_pls import TargetPLS
    from cpr_ext.wings.proving.prove import prove
    from cpr_ext.wings.remote import RemoteOptions

__all__ = [
    "AllRows",
    "Checkpointer",
    "Continuous",
    "CprError",
    "DamageError",
    "EverySeconds",
    "EverySteps",
    "LargestChange",
    "MostFrequentlyUsed",
    "NanError",
    "PerRank",
    "Precision",
    "Priority",
    "RecoveryReport",
    "RemoteOptions",
    "Retention",
    "RowIndexError",
    "Schedule",
    "SlotKeys",
    "SnapshotError",
    "SnapshotFailedWarning",
    "SnapshotHandle",
    "StagingOptions",
    "StorageError",
    "StoreError",
    "StoreOptions",
    "SubSampledUsed",
    "Table",
    "TargetPLS",
    "UntrackedChangeWarning",
    "UsageError",
    "load_into",
    "position",
    "prove",
]

__version__ = "0.1.0"

# Imported when first asked for: torch takes seconds, and `cpr --help` or a look at a store need
# none of it.
_MODULES = {
    "AllRows": "saving.priorities",
    "Checkpointer": "checkpointer.checkpointer",
    "Continuous": "saving.schedules",
    "CprError": "errors",
    "DamageError": "errors",
    "EverySeconds": "saving.schedules",
    "EverySteps": "saving.schedules",
    "LargestChange": "saving.priorities",
    "MostFrequentlyUsed": "saving.priorities",
    "NanError": "errors",
    "PerRank": "state.stateful",
    "Precision": "state.precision",
    "Priority": "saving.priorities",
    "RecoveryReport": "recovery.report",
    "RemoteOptions": "wings.remote",
    "Retention": "storage.retention",
    "RowIndexError": "errors",
    "Schedule": "saving.schedules",
    "SlotKeys": "state.slot_keys",
    "SnapshotError": "errors",
    "SnapshotFailedWarning": "errors",
    "SnapshotHandle": "saving.snapshot_handle",
    "StagingOptions": "checkpointer.options",
    "StorageError": "errors",
    "StoreError": "errors",
    "StoreOptions": "checkpointer.options",
    "SubSampledUsed": "saving.priorities",
    "Table": "state.table",
    "TargetPLS": "wings.policy.target_pls",
    "UntrackedChangeWarning": "errors",
    "UsageError": "errors",
    "load_into": "checkpointer.recovery_calls",
    "position": "recovery.restore",
    "prove": "wings.proving.prove",
}
# What is often looked for here.
_ELSEWHERE = {
    "CprCallback": "wings.callbacks.lightning",
    "CprTrainerCallback": "wings.callbacks.transformers",
    "Parity": "distributed",
    "Subscriber": "wings.publishing",
    "Worker": "distributed",
    "export_metrics": "wings.callbacks.opentelemetry",
    "make_checkpointer": "integrations.torchrec",
    "recover_together": "distributed",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        place = f"; it is in cpr_ext.{_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'cpr_ext' has no attribute {name!r}{place}")
    value = getattr(importlib.import_module(f"cpr_ext.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
