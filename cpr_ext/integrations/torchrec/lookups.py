"""Lookups as they arrive at this rank, after the input distribution, with multiplicity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from cpr_ext import Table
from cpr_ext.integrations.torchrec.row_cache import RowCache
from cpr_ext.runtime.cuda import copy_to_host


class KernelLookups:
    """What one batched operator of FBGEMM looks up, and when it changes that.

    A :class:`cpr_ext.state.table.ChangeSource`. Lookups with gradients are reported, in eval mode
    too: the fused optimizer changes rows in any backward pass.

    Attributes:
        tables: by position in the operator; those without rows on this rank are left out.
        cache: of rows of the operator; it notes when they change.
    """

    def __init__(self, operator: Any, cache: RowCache) -> None:
        self._operator = operator
        self.cache = cache
        self.tables: dict[int, Table] = {}

    def watch_lookups(self, note: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """See :class:`cpr_ext.state.table.ChangeSource`."""

        def note_lookups(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                for table, indices in self._lookups_of(args, kwargs)():
                    note(table, indices)

        return [self._operator.register_forward_pre_hook(note_lookups, with_kwargs=True)]

    def watch_changes(self, before: Callable[[Table, torch.Tensor], None]) -> Sequence[Any]:
        """See :class:`cpr_ext.state.table.ChangeSource`."""

        def watch_output(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> None:
            if not output.requires_grad:
                return
            self.cache.note_change()
            lookups = self._lookups_of(args, kwargs)

            def report(gradient: torch.Tensor) -> None:
                for table, indices in lookups():
                    before(table, indices)
                self.cache.note_change()  # last: the update follows

            # Runs once the gradient is there, before the operator's backward, which is the update.
            output.register_hook(report)  # type: ignore[no-untyped-call]

        return [self._operator.register_forward_hook(watch_output, with_kwargs=True)]

    def _lookups_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Iterator[tuple[Table, torch.Tensor]]]:
        given = dict(zip(("indices", "offsets"), args, strict=False)) | kwargs
        batch_sizes = given.get("batch_size_per_feature_per_rank")
        return self._split(given["indices"], given["offsets"], batch_sizes)

    def _split(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> Callable[[], Iterator[tuple[Table, torch.Tensor]]]:
        """Return what yields indices (n,) int64 of all features, one after the other, by table.

        Of offsets on a GPU the host gets a copy; what is returned waits for that, and not more.

        Args:
            offsets: (bags + 1,), where the bags of all features begin.
            batch_sizes: bags of each feature from each rank; None: the same of every feature.
        """
        features = self._operator.feature_table_map
        if batch_sizes is None:
            num_bags = (offsets.numel() - 1) // len(features)
            read_bounds = copy_to_host(offsets[:: max(1, num_bags)])
        else:
            firsts = accumulate((sum(sizes) for sizes in batch_sizes), initial=0)
            read_bounds = copy_to_host(offsets[list(firsts)])

        def split() -> Iterator[tuple[Table, torch.Tensor]]:
            bounds = read_bounds()[: len(features) + 1]
            sizes = [end - begin for begin, end in pairwise(bounds)]
            pieces = torch.split_with_sizes(indices[bounds[0] : bounds[-1]].long(), sizes)
            for position, piece, size in zip(features, pieces, sizes, strict=True):
                table = self.tables.get(position)
                if table is not None and size > 0:
                    yield table, piece

        return split
