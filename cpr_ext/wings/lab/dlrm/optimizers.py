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

    The tables get row-wise Adagrad, the MLPs plain Adagrad.
    """
    tables = list(model.tables.parameters())
    table_ids = {id(parameter) for parameter in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in table_ids]
    of_tables = RowWiseAdagrad(tables, lr=settings.table_lr)
    return of_tables, torch.optim.Adagrad(dense, lr=settings.dense_lr)
