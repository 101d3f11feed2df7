"""How good a model is on the test samples of a source."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.metrics import auc, logloss
from cpr_ext.wings.lab.dlrm.model import DLRM


@dataclass(frozen=True)
class Evaluation:
    """Test figures; `auc` is nan when the test samples have one class only, or there are none."""

    auc: float
    logloss: float
    num_samples: int


@torch.no_grad()
def evaluate(model: DLRM, source: DataSource, *, batch_size: int = 4096) -> Evaluation:
    """Return scores all test samples of `source` on the device of `model`.

    Raises:
        UsageError: scikit-learn is missing.
    """
    device = next(model.parameters()).device
    labels, logits = [torch.empty(0)], [torch.empty(0)]
    for batch in source.test_batches(batch_size):
        logits.append(model(batch.to(device)).cpu())
        labels.append(batch.labels)
    all_labels, all_logits = torch.cat(labels), torch.cat(logits)
    return Evaluation(auc(all_labels, all_logits), logloss(all_labels, all_logits), len(all_labels))
