"""The two optimizers of a DLRM: one for its tables, one for its MLPs."""

from __future__ import annotations

import torch

from cpr_ext.wings.lab.dlrm.batch import Hyperparameters
from cpr_ext.wings.lab.dlrm.model import DLRM
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad


def build_optimizers(
    model: DLRM, settings: Hyperparameters
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return optimizers over `model`'s tables and over all its other parameters, in this order.

    The MLPs get plain Adagrad.
    """
    tables = list(model.tables.parameters())
    table_ids = {id(parameter) for parameter in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in table_ids]
    return _table_optimizer(tables, settings), torch.optim.Adagrad(dense, lr=settings.dense_lr)


def _table_optimizer(
    tables: list[torch.nn.Parameter], settings: Hyperparameters
) -> torch.optim.Optimizer:
    match settings.table_optimizer:
        case "rowwise_adagrad":
            return RowWiseAdagrad(tables, lr=settings.table_lr)
        case "adagrad":
            return torch.optim.Adagrad(tables, lr=settings.table_lr)
        case "sgd":
            return torch.optim.SGD(tables, lr=settings.table_lr)
