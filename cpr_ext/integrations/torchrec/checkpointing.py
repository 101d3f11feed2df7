"""A Checkpointer for one rank of a job that trains a TorchRec model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from cpr_ext import Checkpointer, RecoveryReport, StagingOptions, Table
from cpr_ext.distributed.together import must_agree, recover_together
from cpr_ext.integrations.torchrec.dense_part import DenseModule
from cpr_ext.integrations.torchrec.managed_collisions import ManagedTables
from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from cpr_ext.integrations.torchrec.wrapped_optimizers import dense_optimizers
from cpr_ext.state.stateful import PerRank, joined_state
from cpr_ext.state.table import find_tables

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
    if managed.progress and not kernels:
        tables = find_tables(get_unwrapped_module(model), dense)
    managed.give_keys(tables)
    if managed.progress:
        more = {f"torchrec.{n}": PerRank(each) for n, each in enumerate(managed.progress)}
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
