"""The reference model on several workers: each holds a range of rows of every table.

Every worker sees the whole batch's indices and looks up the rows it has. Workers exchange the
partial sums of bags, so that each has whole vectors for its part of the batch. MLPs are replicated.
Up to the order of additions a step is the same as that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import Batch
from cpr_ext.wings.lab.dlrm.model import DLRM


class _SumOfParts(torch.autograd.Function):
    """(batch_size, dim) partial sums -> (batch_size / world_size, dim), this worker's part."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(partial)
        dist.all_to_all_single(received, partial.contiguous(), group=group)
        return received.view(group.size(), -1, partial.shape[1]).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        sent = gradient.repeat(size, 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received, None


class RowShard(nn.Module):
    """Some rows of an embedding bag, in place of the whole.

    Args:
        rows: those that this worker holds.
        begin: where in the table they begin.
        group: whose members hold the others.
    """

    def __init__(self, rows: nn.EmbeddingBag, begin: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.rows = rows
        self._begin = begin
        self._end = begin + rows.num_embeddings
        self._group = group

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Sum of the bags of this worker's part of the batch: (batch_size / world_size, dim)."""
        held = (indices >= self._begin) & (indices < self._end)
        before = torch.cat((held.new_zeros(1, dtype=torch.int64), held.cumsum(0)))
        partial = self.rows(indices[held] - self._begin, before[offsets])
        result: torch.Tensor = _SumOfParts.apply(partial, self._group)  # type: ignore[no-untyped-call]
        return result


def shard_rows(
    model: DLRM, row_ranges: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> None:
    """Leave ``model`` only the rows in ``row_ranges``, one range per table; before training."""
    for (name, bag), (begin, end) in zip(list(model.tables.items()), row_ranges, strict=True):
        assert isinstance(bag, nn.EmbeddingBag)
        weight = bag.weight.detach()[begin:end].clone()
        rows = nn.EmbeddingBag(
            len(weight), bag.embedding_dim, mode="sum", sparse=True, _weight=weight
        )
        model.tables[name] = RowShard(rows, begin, group)


def own_part(batch: Batch, group: dist.ProcessGroup) -> Batch:
    """Return dense features and labels of this worker's part of a batch; all of its indices.

    Raises:
        UsageError: the batch cannot be cut into as many equal parts as there are workers.
    """
    size = group.size()
    if batch.batch_size % size:
        raise UsageError(
            f"a batch of {batch.batch_size} cannot be shared by {size} workers; take a multiple"
        )
    part = slice(
        group.rank() * batch.batch_size // size, (group.rank() + 1) * batch.batch_size // size
    )
    return Batch(batch.dense[part], batch.indices, batch.offsets, batch.labels[part])


def sum_gradients(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give every worker the sum of all workers' gradients, in one exchange."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for parameter, values in zip(
        parameters, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
    ):
        parameter.grad = values.view_as(parameter)
