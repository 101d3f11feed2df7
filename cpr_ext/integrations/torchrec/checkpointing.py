"""A Checkpointer for one rank of a job that trains a TorchRec model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from cpr_ext import Checkpointer, RecoveryReport, StagingOptions, Table
from cpr_ext.distributed.together import must_agree, recover_together
from cpr_ext.integrations.torchrec.managed_collisions import ManagedTables
from cpr_ext.integrations.torchrec.sharded_tables import Kernel, find_kernels, sharded_tables
from cpr_ext.integrations.torchrec.wrapped_optimizers import WrapperStates, dense_optimizers
from cpr_ext.state.dense_schema import FUSED_STATE, is_extra_state
from cpr_ext.state.stateful import PerRank, joined_state
from cpr_ext.state.table import WEIGHT, find_tables

_MOST_THREADS = 4


class RankCheckpointer(Checkpointer):
    """A Checkpointer of one of several ranks, which recover together.

    Args:
        trained: the model that trains; what is saved of it is ``model``.
        arguments, options: see :class:`cpr_ext.Checkpointer`.
    """

    def __init__(self, trained: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._trained = trained

    def recover(self, **options: Any) -> RecoveryReport:
        """See :meth:`cpr_ext.Checkpointer.recover`.

        In a process group of several ranks every rank must call it: all resume at the same step,
        see :func:`cpr_ext.distributed.recover_together`. With ``shards`` a rank is alone.
        """
        if options.get("shards") is not None or not must_agree():
            return super().recover(**options)
        return recover_together(self, model=self._trained, recover=super().recover, **options)


def make_checkpointer(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    directory: str | os.PathLike[str],
    **options: Any,
) -> Checkpointer:
    """Return a Checkpointer of what this rank holds: its parts of the tables, and the dense part.

    No rank waits for another, neither here nor while it saves. Only ``recover()`` is for all ranks
    of the process group together: it returns the same step on each.

    Args:
        model: a ``DistributedModelParallel``, or any module with sharded
            ``EmbeddingBagCollection`` and ``EmbeddingCollection`` in it. With managed collisions
            (``MCHManagedCollisionModule``) their tables are keyed, sharded or not.
        optimizers: those that training steps, as they are: a ``CombinedOptimizer`` with the model's
            fused optimizers in it, or one that ``WarmupOptimizer`` or another wraps.
        directory: the store of this rank.
        options: see :class:`cpr_ext.Checkpointer`. ``StagingOptions.num_threads`` is that of torch
            unless given, at most 4.

    Returns:
        It watches lookups as they arrive at this rank, so those of the whole job's batch in the
        rows it holds. ``recover()`` restores in place, on every rank to the same step, with the
        dense part of the rank that saved last. After a change of the plan or the number of ranks:
        new directories, and ``recover(from_store=[...])`` with those of all old ranks.

    Raises:
        UsageError: a table is sharded in a way that cannot be saved (named), or as Checkpointer.
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    kernels = find_kernels(model)
    managed = ManagedTables(model)
    dense = [each for optimizer in given for each in dense_optimizers(optimizer)]
    tables: list[Table] = [*sharded_tables(kernels)]
    if managed.progress is not None and not kernels:
        tables = find_tables(get_unwrapped_module(model), dense)
    managed.give_keys(tables)
    if managed.progress is not None:
        more = {"torchrec.0": PerRank(managed.progress)}
        options["state"] = joined_state(options.get("state"), more)
    # Several ranks share a machine: as many threads as torch is allowed here, not one per core.
    staging = options.pop("staging", None) or StagingOptions()
    if staging.num_threads is None:
        num_threads = min(_MOST_THREADS, torch.get_num_threads())
        staging = replace(staging, num_threads=num_threads)
    return RankCheckpointer(
        model,
        DenseModule(model, kernels, tables, given, managed.buffers),
        dense,
        directory,
        tables=tables,
        staging=staging,
        **options,
    )


# What they hold is rows, or belongs to kernels of them.
_OF_TABLES = (
    ShardedModule,
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionModule,
)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedTensor | DTensor)


class DenseModule(nn.Module):
    """A model whose ``state_dict()`` has of the sharded tables what this rank holds.

    All other keys are the same on every rank, so that the dense part of one rank fits any other. In
    addition to parameters and buffers it has the steps and learning rates of fused optimizers, and
    what optimizers know that wrap others.

    Args:
        of_rows: ids of buffers whose values belong to rows.
    """

    _model: nn.Module
    _kernels: list[Kernel]
    _rows: dict[str, torch.Tensor]
    _optimizers: list[torch.optim.Optimizer]
    _wrappers: WrapperStates
    _left_out: set[str]

    def __init__(
        self,
        model: nn.Module,
        kernels: Sequence[Kernel],
        tables: Sequence[Table],
        optimizers: Sequence[torch.optim.Optimizer],
        of_rows: Collection[int] = (),
    ) -> None:
        super().__init__()
        # Not as submodules: then the whole model would be in it.
        self.__dict__["_model"] = get_unwrapped_module(model)
        self.__dict__["_kernels"] = list(kernels)
        dense = [inner for optimizer in optimizers for inner in dense_optimizers(optimizer)]
        self.__dict__["_optimizers"] = dense
        self.__dict__["_wrappers"] = WrapperStates(optimizers)
        self.__dict__["_rows"] = {f"{table.name}.weight": table.weight for table in tables}
        values = self._model.state_dict(keep_vars=True).items()
        self.__dict__["_left_out"] = {name for name, value in values if id(value) in of_rows}

    def state_dict(  # type: ignore[override]
        self, *, keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return dense parameters, buffers and this rank's rows by name, and the extra state."""
        prefixes = self._prefixes()
        values = {
            name: value
            for name, value in self._model.state_dict(keep_vars=keep_vars).items()
            if not (_is_sharded(value) and name.startswith(prefixes)) and name not in self._left_out
        }
        replicated = [value for name, value in values.items() if name.startswith(prefixes)]
        fused = {FUSED_STATE: self._fused_state(replicated)}
        return values | self._rows | fused | self._wrappers.capture()

    @property
    def sharded_tables(self) -> frozenset[str]:
        """Names of the tables that the plan cuts, wherever their rows are."""
        prefixes = self._prefixes()
        return frozenset(
            name.removesuffix(f".{WEIGHT}")
            for name, value in self._model.state_dict(keep_vars=True).items()
            if _is_sharded(value) and name.startswith(prefixes) and name.endswith(f".{WEIGHT}")
        )

    def _prefixes(self) -> tuple[str, ...]:
        return tuple(
            f"{name}." if name else ""
            for name, module in self._model.named_modules()
            if isinstance(module, ShardedEmbeddingModule)
        )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules around the tables, with their names in the model; so buffers, too."""
        hidden: tuple[str, ...] = ()
        for name, module in self._model.named_modules(memo, prefix, remove_duplicate):
            if isinstance(module, _OF_TABLES) and not isinstance(module, ShardedEmbeddingTower):
                hidden += (f"{name}.",)
            elif not name.startswith(hidden):
                yield name, module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield dense parameters, and replicated tables, with their names in the model."""
        for name, value in self.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield f"{prefix}.{name}" if prefix else name, value

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module of the model."""
        return self._model.get_submodule(target)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Give modules, and the fused optimizers, their extra state; of ``state_dict`` no more."""
        for name, value in state_dict.items():
            if name == FUSED_STATE:
                self._load_fused_state(value)
            elif is_extra_state(name) and not self._wrappers.restore(name, value):
                self._model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)

    def _fused_state(self, replicated: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return what fused optimizers know; ``replicated``: tables that torch's optimizers have.

        A plan of another number of ranks may have those fused, too.
        """
        steps = [int(kernel.module.iter) for kernel in self._kernels]
        for optimizer, table in product(self._optimizers, replicated):
            steps.append(int(optimizer.state.get(table, {}).get("step", 0)))
        return {
            "iterations": max(steps, default=0),
            "learning_rates": {
                table: float(kernel.fused.param_groups[0]["lr"])
                for kernel in self._kernels
                for table in kernel.table_names
            },
            # By which decay by counts tells rare rows; it follows the rows only now and then.
            "max_counters": {
                table: float(kernel.module.max_counter)
                for kernel in self._kernels
                if kernel.module._used_rowwise_adagrad_with_counter
                for table in kernel.table_names
            },
        }

    def _load_fused_state(self, state: Any) -> None:
        rates, counters = state["learning_rates"], state["max_counters"]
        # The state may be another rank's, which has other tables.
        common = next(iter(rates.values())) if len(set(rates.values())) == 1 else None
        for kernel in self._kernels:
            if state["iterations"]:  # a rank without tables knows nothing of them
                kernel.module.iter.fill_(state["iterations"])
                kernel.module.iter_cpu.fill_(state["iterations"])
            names = kernel.table_names
            rate = next((rates[name] for name in names if name in rates), common)
            if rate is not None:
                kernel.fused.param_groups[0]["lr"] = rate
                kernel.module.set_learning_rate(rate)
            if found := [counters[name] for name in names if name in counters]:
                kernel.module.max_counter.fill_(max(found))
