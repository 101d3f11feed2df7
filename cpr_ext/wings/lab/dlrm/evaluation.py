"""How good a model is on the test samples of a source: AUC and log loss, by scikit-learn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.model import DLRM


@dataclass(frozen=True)
class Evaluation:
    """Test figures; `auc` is nan when the test samples have one class only, or there are none."""

    auc: float
    logloss: float
    num_samples: int


@torch.no_grad()
def evaluate(model: DLRM, source: DataSource, *, batch_size: int = 4096) -> Evaluation:
    """Return the scores of all test samples of `source`, on the device of `model`."""
    device = next(model.parameters()).device
    labels, logits = [torch.empty(0)], [torch.empty(0)]
    for batch in source.test_batches(batch_size):
        logits.append(model(batch.to(device)).cpu())
        labels.append(batch.labels)
    all_labels, all_logits = (torch.cat(each).double().numpy() for each in (labels, logits))
    return Evaluation(auc(all_labels, all_logits), logloss(all_labels, all_logits), len(all_labels))


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """Return the area under the ROC curve: 0.5 for chance; nan for less than two classes.

    Args:
        labels: (num_samples,), 0 or 1.
        scores: (num_samples,), higher for more likely 1; logits and probabilities give the same.
    """
    if np.unique(labels).size < 2:
        return math.nan
    from sklearn import metrics

    return float(metrics.roc_auc_score(labels, scores))


def logloss(labels: npt.ArrayLike, logits: npt.ArrayLike) -> float:
    """Return the mean binary cross-entropy in nats; nan if there is no sample.

    Args:
        labels: (num_samples,), 0 or 1.
        logits: (num_samples,), log-odds of a label being 1, not probabilities.
    """
    if np.size(labels) == 0:
        return math.nan
    from sklearn import metrics

    probabilities = 0.5 * (1.0 + np.tanh(0.5 * np.asarray(logits)))  # without overflow
    return float(metrics.log_loss(labels, probabilities, labels=[0.0, 1.0]))
