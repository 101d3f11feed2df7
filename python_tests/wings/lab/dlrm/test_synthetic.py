import numpy as np
import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

BLOCK = 4096


def all_samples(source: Synthetic, batch_size: int) -> tuple[torch.Tensor, ...]:
    batches = list(source.train_batches(batch_size))
    return (
        torch.cat([batch.dense for batch in batches]),
        torch.cat([torch.stack(batch.indices) for batch in batches], dim=1),
        torch.cat([batch.labels for batch in batches]),
    )


@pytest.mark.parametrize("batch_size", [7, 1000, BLOCK, 3 * BLOCK + 1])
def test_samples_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    source = Synthetic((1000, 10), num_samples=10_000)
    expected = all_samples(source, 10_000)
    assert all(map(torch.equal, all_samples(source, batch_size), expected))


def test_hot_rows_are_as_hot_as_in_production_and_spread_over_the_table() -> None:
    source = Synthetic((80_000,), num_samples=100_000)
    counts = np.bincount(all_samples(source, 100_000)[1][0].numpy(), minlength=80_000)
    hottest = np.argsort(-counts)
    # Statistics of 2022: 1.84 % of the rows take 51.9 % of the accesses.
    assert counts[hottest[: int(0.0184 * 80_000)]].sum() == pytest.approx(51_900, rel=0.03)
    per_shard = counts.reshape(8, 10_000)
    of_hot_rows = np.bincount(hottest[:800] // 10_000, minlength=8)
    assert of_hot_rows == pytest.approx(np.full(8, 100), abs=40)
    assert per_shard.sum(axis=1).max() < 0.35 * 100_000


def test_labels_follow_the_teacher() -> None:
    source = Synthetic("tiny", num_samples=50_000)
    assert 0.84 < source.teacher_auc < 0.90
    _, _, labels = all_samples(source, 50_000)
    assert 0.2 < labels.mean() < 0.6


@pytest.mark.parametrize(
    "arguments",
    [
        {"size": ()},
        {"size": (5, 0)},
        {"size": "huge"},
        {"num_samples": 0},
        {"num_dense": -1},
        {"seed": -1},
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Synthetic(**arguments)
