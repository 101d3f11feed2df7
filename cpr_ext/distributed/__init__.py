"""Live partial recovery: workers of one job that outlive each other.

>>> worker = Worker.from_environment(store="ckpts")
>>> worker.run(build, train_step, num_steps=10_000)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpr_ext.distributed.collective.process_group import ReformableGroup
    from cpr_ext.distributed.identity.worker_identity import Identity, TimeOuts, worker_directory
    from cpr_ext.distributed.job import Event, Job, Recovery
    from cpr_ext.distributed.parity.options import Parity
    from cpr_ext.distributed.together import recover_together
    from cpr_ext.distributed.worker import Worker

__all__ = [
    "Event",
    "Identity",
    "Job",
    "Parity",
    "Recovery",
    "ReformableGroup",
    "TimeOuts",
    "Worker",
    "recover_together",
    "worker_directory",
]

# Imported when first asked for: the launcher needs none of torch.
_MODULES = {
    "Event": "job",
    "Identity": "identity.worker_identity",
    "Job": "job",
    "Parity": "parity.options",
    "Recovery": "job",
    "ReformableGroup": "collective.process_group",
    "TimeOuts": "identity.worker_identity",
    "Worker": "worker",
    "recover_together": "together",
    "worker_directory": "identity.worker_identity",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cpr_ext.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cpr_ext.distributed.{_MODULES[name]}"), name)
