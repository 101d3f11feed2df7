"""How good predictions are: AUC and log loss, by scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cpr_ext.errors import UsageError

ArrayLike = torch.Tensor | npt.ArrayLike


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the area under the ROC curve.

    Args:
        labels: (num_samples,), 0 or 1.
        scores: (num_samples,), higher for more likely 1; logits and probabilities give the same.

    Returns:
        0.5 for chance, 1 for perfect; nan if only one class is present, or no sample.

    Raises:
        UsageError: scikit-learn is missing, or the shapes differ.
    """
    label_array, score_array = _same_shape(labels, scores)
    if np.unique(label_array).size < 2:
        return math.nan
    return float(_sklearn_metrics().roc_auc_score(label_array, score_array))


def logloss(labels: ArrayLike, logits: ArrayLike) -> float:
    """Return the mean binary cross-entropy in nats.

    Args:
        labels: (num_samples,), 0 or 1.
        logits: (num_samples,), log-odds of a label being 1, not probabilities.

    Returns:
        0 or more; nan if there is no sample. One class alone is fine.

    Raises:
        UsageError: scikit-learn is missing, or the shapes differ.
    """
    label_array, logit_array = _same_shape(labels, logits)
    if label_array.size == 0:
        return math.nan
    probabilities = 0.5 * (1.0 + np.tanh(0.5 * logit_array))  # the sigmoid, without overflow
    return float(_sklearn_metrics().log_loss(label_array, probabilities, labels=[0.0, 1.0]))


def _same_shape(
    labels: ArrayLike, scores: ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    pair = tuple(
        np.asarray(
            values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values,
            dtype=np.float64,
        )
        for values in (labels, scores)
    )
    if pair[0].shape != pair[1].shape or pair[0].ndim != 1:
        raise UsageError(
            f"labels and scores must have one shape (num_samples,); got {pair[0].shape} "
            f"and {pair[1].shape}"
        )
    return pair[0], pair[1]


def _sklearn_metrics() -> Any:
    try:
        from sklearn import metrics
    except ImportError as error:
        raise UsageError('metrics need scikit-learn: pip install "cpr_ext[train]"') from error
    return metrics
