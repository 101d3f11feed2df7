"""TorchRec: sharded embedding tables whose optimizer is fused into their backward pass.

>>> model = DistributedModelParallel(...)
>>> ckpt = make_checkpointer(model, optimizer, f"stores/rank-{rank}")
>>> report = ckpt.recover()

Each rank has a store of its own, with the parts of the tables that the plan gave it, and saves
without waiting for others.
"""

try:
    import fbgemm_gpu  # noqa: F401
    import torchrec  # noqa: F401
except ImportError as error:
    from cpr_ext.errors import UsageError

    raise UsageError(
        f"TorchRec cannot be imported ({error}). Install it with torch 2.13 by: pip install "
        "--no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 && pip install torchmetrics==1.0.3 "
        "tensordict tqdm pyre-extensions iopath"
    ) from error

from cpr_ext.integrations.torchrec.checkpointing import make_checkpointer
from cpr_ext.integrations.torchrec.planned_shards import sharding_env
from cpr_ext.runtime.log_text import hide_foreign_warnings

hide_foreign_warnings()  # each rank would repeat them

__all__ = ["make_checkpointer", "sharding_env"]
