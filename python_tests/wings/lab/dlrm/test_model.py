import math

import pytest
import torch

from cpr_ext.wings.lab.dlrm.batch import Batch
from cpr_ext.wings.lab.dlrm.model import DLRM
from python_tests.helpers import on_devices


def small_model(num_dense=3, seed=0):
    return DLRM(
        table_names=("a", "b", "c"),
        num_embeddings=(5, 7, 2),
        embedding_dim=4,
        num_dense=num_dense,
        bottom_mlp=(6, 4),
        top_mlp=(8, 1),
        seed=seed,
    )


def small_batch(num_dense=3):
    # Table "b" has bags of 2, 0 and 1 lookups.
    return Batch(
        dense=torch.randn(3, num_dense, generator=torch.Generator().manual_seed(1)),
        indices=[torch.tensor([4, 0, 4]), torch.tensor([6, 6, 1]), torch.tensor([0, 1, 1])],
        offsets=[torch.arange(3), torch.tensor([0, 2, 2]), torch.arange(3)],
        labels=torch.tensor([0.0, 1.0, 1.0]),
    )


def reference_logits(model, batch):
    """The model, a sample and a pair at a time."""
    logits = []
    for sample in range(batch.batch_size):
        vectors = []
        if model.bottom is not None:
            vectors.append(model.bottom(batch.dense[sample]))
        for bag, indices, offsets in zip(
            model.tables.values(), batch.indices, batch.offsets, strict=True
        ):
            ends = [*offsets.tolist(), len(indices)]
            rows = indices[ends[sample] : ends[sample + 1]]
            vectors.append(bag.weight[rows].sum(dim=0))
        features = [vectors[0]] if model.bottom is not None else []
        for later in range(len(vectors)):
            for earlier in range(later):
                features.append((vectors[later] @ vectors[earlier]).reshape(1))
        logits.append(model.top(torch.cat(features)))
    return torch.cat(logits)


@on_devices
@pytest.mark.parametrize("num_dense", [0, 3])
def test_logits_and_gradients_equal_a_plain_loop(num_dense, device):
    model, batch = small_model(num_dense).to(device), small_batch(num_dense).to(device)
    with torch.no_grad():  # so large that a wrong pair or bag shows
        for bag in model.tables.values():
            bag.weight.normal_(generator=torch.Generator(device).manual_seed(2))
    expected = reference_logits(model, batch)
    logits = model(batch)
    assert logits.shape == (3,)
    torch.testing.assert_close(logits, expected)

    parameters = list(model.parameters())
    weights = torch.tensor([1.0, -2.0, 0.5], device=device)
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    got = torch.autograd.grad((logits * weights).sum(), parameters)
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left.to_dense(), right)


def test_initial_values_follow_the_published_distributions():
    model = DLRM(
        table_names=("a", "b"),
        num_embeddings=(400, 2_500),
        embedding_dim=64,
        num_dense=300,
        bottom_mlp=(500, 64),
        top_mlp=(200, 1),
    )
    for name, rows in (("a", 400), ("b", 2_500)):
        weight, bound = model.tables[name].weight.detach(), math.sqrt(1 / rows)
        assert 0.99 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert weight.mean().item() == pytest.approx(0.0, abs=0.02 * bound)
    first = model.bottom[0]
    assert first.weight.std().item() == pytest.approx(math.sqrt(2 / (300 + 500)), rel=0.02)
    assert first.bias.std().item() == pytest.approx(math.sqrt(1 / 500), rel=0.1)
