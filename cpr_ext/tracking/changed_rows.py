"""The rows that a gradient changes, read from the gradient of one table."""

from __future__ import annotations

import torch

from cpr_ext._native import native


def changed_rows(gradient: torch.Tensor, pool: native.ThreadPool | None = None) -> torch.Tensor:
    """Row ids (n,) int64, some perhaps repeated, outside of which a gradient is zero."""
    if gradient.layout == torch.sparse_coo:
        indices = gradient._indices()
        return indices.view(-1) if indices.shape[0] == 1 else indices[0].contiguous()
    if gradient.layout != torch.strided:
        return changed_rows(gradient.to_sparse_coo())  # type: ignore[no-untyped-call]
    if gradient.is_cuda or not gradient.is_contiguous():
        return gradient.any(dim=1).nonzero().view(-1)
    return torch.from_numpy(native.nonzero_rows(gradient, pool))
