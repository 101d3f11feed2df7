"""Everything of a TorchRec model that is not a row of a sharded table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from cpr_ext import Table
from cpr_ext.errors import UsageError
from cpr_ext.integrations.torchrec.sharded_tables import Kernel
from cpr_ext.state.dense_schema import is_extra_state

_FUSED = "fused_optimizers._extra_state"


class DenseModule(nn.Module):
    """A model whose ``state_dict()`` has of the sharded tables what this rank holds.

    All other keys are the same on every rank, so that the dense part of one rank fits any other. In
    addition to parameters and buffers it has the steps and learning rates of fused optimizers.
    """

    _model: nn.Module
    _kernels: list[Kernel]
    _rows: dict[str, torch.Tensor]

    def __init__(
        self, model: nn.Module, kernels: Sequence[Kernel], tables: Sequence[Table]
    ) -> None:
        super().__init__()
        # Not as submodules: then the whole model would be in it.
        self.__dict__["_model"] = get_unwrapped_module(model)
        self.__dict__["_kernels"] = list(kernels)
        self.__dict__["_rows"] = {f"{table.name}.weight": table.weight for table in tables}

    def state_dict(  # type: ignore[override]
        self, *, keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return dense parameters, buffers and this rank's rows by name, and the extra state."""
        sharded = tuple(
            f"{name}." if name else ""
            for name, module in self._model.named_modules()
            if isinstance(module, ShardedEmbeddingModule)
        )
        values = {
            name: value
            for name, value in self._model.state_dict(keep_vars=keep_vars).items()
            if not (isinstance(value, ShardedTensor | DTensor) and name.startswith(sharded))
        }
        return values | self._rows | {_FUSED: self._fused_state()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Give modules, and the fused optimizers, their extra state; of ``state_dict`` no more."""
        for name, value in state_dict.items():
            if name == _FUSED:
                self._load_fused_state(value)
            elif is_extra_state(name):
                self._model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    def _fused_state(self) -> dict[str, Any]:
        operators = [kernel.module for kernel in self._kernels]
        return {
            "iterations": max((int(operator.iter) for operator in operators), default=0),
            "learning_rates": {
                part.table: float(kernel.fused.param_groups[0]["lr"])
                for kernel in self._kernels
                for part in kernel.parts
                if part is not None
            },
        }

    def _load_fused_state(self, state: Any) -> None:
        rates = state["learning_rates"]
        # The state may be another rank's, which has other tables.
        common = next(iter(rates.values())) if len(set(rates.values())) == 1 else None
        for kernel in self._kernels:
            if rates:  # a rank without tables knows nothing of them
                kernel.module.iter.fill_(state["iterations"])
                kernel.module.iter_cpu.fill_(state["iterations"])
            named = (rates[p.table] for p in kernel.parts if p is not None and p.table in rates)
            rate = next(named, common)
            if rate is not None:
                kernel.fused.param_groups[0]["lr"] = rate
                kernel.module.set_learning_rate(rate)


def dense_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers of dense parameters inside ``optimizer``.

    Raises:
        UsageError: it is wrapped by one that has state of its own.
    """
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from dense_optimizers(inner)
    elif isinstance(optimizer, KeyedOptimizerWrapper):
        yield optimizer._optimizer
    elif isinstance(optimizer, OptimizerWrapper):
        raise UsageError(
            f"a {type(optimizer).__name__} has state that is not saved; use a scheduler of "
            "torch.optim.lr_scheduler and give it to the Checkpointer: stateful=[scheduler]"
        )
    elif not isinstance(optimizer, FusedOptimizer):
        yield optimizer
