"""Adagrad with one accumulator per embedding row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import numpy as np
import torch

from cpr_ext.errors import UsageError


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad that keeps the mean square gradient of a row instead of one value per element.

    For each row i that has a gradient g_i of `dim` elements::

        sum_i <- sum_i + mean(g_i ** 2)
        w_i   <- w_i - lr * g_i / (sqrt(sum_i) + eps)

    This is "exact row-wise Adagrad" of FBGEMM (``EmbOptimType.EXACT_ROWWISE_ADAGRAD``) and
    ``RWSAdagrad`` of the dlrm repository. State is 4 bytes per row where Adagrad has 4 * dim.

    Parameters are (num_embeddings, dim), with sparse or dense gradients; a row whose gradient is
    all zero is left as it is. State: ``sum``, float32 (num_embeddings,), whatever the dtype of
    the parameter.

    Args:
        params: tables, or parameter groups of them.
        lr: learning rate, 0 or more.
        eps: added to the denominator, above 0.
        initial_accumulator_value: first value of ``sum``, 0 or more.

    Raises:
        UsageError: a setting out of range, or a parameter that has not two dimensions.
    """

    # See Table.updates_only_looked_up_rows: a row without a gradient stays as it is.
    updates_only_looked_up_rows = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        if not lr >= 0.0:
            raise UsageError(f"lr is {lr}; it must be 0 or more")
        if not eps > 0.0:
            raise UsageError(f"eps is {eps}; it must be above 0")
        if not initial_accumulator_value >= 0.0:
            raise UsageError(
                f"initial_accumulator_value is {initial_accumulator_value}; it must be 0 or more"
            )
        defaults = {
            "lr": lr,
            "eps": eps,
            "initial_accumulator_value": initial_accumulator_value,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise UsageError(
                        "RowWiseAdagrad takes tables of shape (num_embeddings, dim); "
                        f"got shape {tuple(parameter.shape)}"
                    )
                # Made here, not at the first step, so that a snapshot before it has all states.
                self.state[parameter]["sum"] = _sums(
                    parameter.shape[0], group["initial_accumulator_value"], parameter.device
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients; returns the closure's loss if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(
                        parameter, self.state[parameter]["sum"], lr=group["lr"], eps=group["eps"]
                    )
        return loss


def _sums(count: int, value: float, device: torch.device) -> torch.Tensor:
    if value == 0 and device.type == "cpu":
        # Unlike torch's, numpy's zeros take memory and time only as rows are first used.
        return torch.from_numpy(np.zeros(count, dtype=np.float32))
    return torch.full((count,), value, dtype=torch.float32, device=device)


def _update(parameter: torch.Tensor, row_sum: torch.Tensor, *, lr: float, eps: float) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        row_ids = gradient.indices()[0]
        values = gradient.values().to(torch.float32)  # (num_touched_rows, dim)
        sums = row_sum.index_select(0, row_ids) + values.square().mean(dim=1)
        row_sum.index_copy_(0, row_ids, sums)
        update = values.mul(-lr).div_(sums.sqrt().add_(eps).unsqueeze(1))
        parameter.index_add_(0, row_ids, update.to(parameter.dtype))
    else:
        values = gradient.to(torch.float32)
        row_sum.add_(values.square().mean(dim=1))
        parameter.sub_((values * lr).div_(row_sum.sqrt().add_(eps).unsqueeze(1)))
