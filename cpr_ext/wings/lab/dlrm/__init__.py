"""The reference model (DLRM) and the data it is trained on."""

from __future__ import annotations

from cpr_ext.wings.lab.dlrm.batch import Batch, DataSource, Hyperparameters
from cpr_ext.wings.lab.dlrm.evaluation import Evaluation, evaluate
from cpr_ext.wings.lab.dlrm.model import DLRM, initial_rows
from cpr_ext.wings.lab.dlrm.optimizers import build_optimizers
from cpr_ext.wings.lab.dlrm.presets import ModelPreset, find_preset
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from cpr_ext.wings.lab.dlrm.sources import open_source

__all__ = [
    "DLRM",
    "Batch",
    "DataSource",
    "Evaluation",
    "Hyperparameters",
    "ModelPreset",
    "RowWiseAdagrad",
    "build_optimizers",
    "evaluate",
    "find_preset",
    "initial_rows",
    "open_source",
]
