import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.wings.lab.dlrm.evaluation import auc, logloss

SAMPLES = st.lists(
    st.tuples(st.integers(0, 1), st.floats(-20, 20, width=32)), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_auc_is_the_share_of_pairs_in_the_right_order(samples):
    positive = [score for label, score in samples if label]
    negative = [score for label, score in samples if not label]
    got = auc([label for label, _ in samples], [score for _, score in samples])
    if not positive or not negative:
        assert math.isnan(got)
        return
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    assert got == pytest.approx(wins / (len(positive) * len(negative)))


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_logloss_is_the_binary_cross_entropy_of_the_logits(samples):
    labels = torch.tensor([float(label) for label, _ in samples])
    logits = torch.tensor([logit for _, logit in samples], dtype=torch.float64)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.double())
    assert logloss(labels, logits) == pytest.approx(expected.item(), rel=1e-5, abs=1e-9)


def test_no_samples_or_one_class_give_nan():
    assert math.isnan(auc([], []))
    assert math.isnan(logloss([], []))
    assert math.isnan(auc([1.0, 1.0], [0.2, 0.9]))
    assert logloss([1.0, 1.0], [0.0, 0.0]) == pytest.approx(math.log(2))
