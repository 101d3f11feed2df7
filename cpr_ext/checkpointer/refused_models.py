"""Refuses, by name, models whose parameters are not whole in this process."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from cpr_ext.errors import UsageError

# Of torch.distributed; classes that `fully_shard` makes derive from FSDPModule.
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


def refuse_sharded_models(model: nn.Module) -> None:
    """Raise UsageError for FSDP, which holds parts of parameters, and takes their memory away."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _SHARDED and kind.__module__.startswith("torch.distributed"):
                raise UsageError(
                    f"module '{name or type(module).__name__}' is under {kind.__name__} (FSDP): "
                    "this process holds only parts of its parameters. Wrap the dense part in "
                    "DistributedDataParallel instead, and shard tables with TorchRec or by hand "
                    "(cpr_ext.Table with part=)"
                )


def refuse_several_processes() -> None:
    """Raise UsageError if this process trains with others, which would end at other steps."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UsageError(
            f'on_sigterm="save" is for training in one process, and this is one of '
            f"{dist.get_world_size()}: SIGTERM reaches them at different steps. Leave it "
            "out. A cpr_ext.distributed.Worker does it by itself; without one, have your script "
            "end all of them after the same step: close() saves all rows"
        )
