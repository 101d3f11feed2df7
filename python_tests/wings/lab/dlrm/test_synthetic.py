import numpy as np
import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.evaluation import auc
from cpr_ext.wings.lab.dlrm.synthetic import PlantedTeacher, Synthetic

BLOCK = 4096


def all_samples(source, batch_size):
    batches = list(source.train_batches(batch_size))
    return (
        torch.cat([batch.dense for batch in batches]),
        torch.cat([torch.stack(batch.indices) for batch in batches], dim=1),
        torch.cat([batch.labels for batch in batches]),
    )


@pytest.mark.parametrize("batch_size", [7, 1000, BLOCK, 3 * BLOCK + 1])
def test_samples_do_not_depend_on_the_batch_size(batch_size):
    source = Synthetic((1000, 10), num_samples=10_000)
    expected = all_samples(source, 10_000)
    assert all(map(torch.equal, all_samples(source, batch_size), expected))


def test_hot_rows_are_as_hot_as_in_production_and_spread_over_the_table():
    source = Synthetic((80_000,), num_samples=100_000)
    counts = np.bincount(all_samples(source, 100_000)[1][0].numpy(), minlength=80_000)
    hottest = np.argsort(-counts)
    # Statistics of 2022: 1.84 % of the rows take 51.9 % of the accesses.
    assert counts[hottest[: int(0.0184 * 80_000)]].sum() == pytest.approx(51_900, rel=0.03)
    per_shard = counts.reshape(8, 10_000)
    of_hot_rows = np.bincount(hottest[:800] // 10_000, minlength=8)
    assert of_hot_rows == pytest.approx(np.full(8, 100), abs=40)
    assert per_shard.sum(axis=1).max() < 0.35 * 100_000


def test_labels_follow_the_teacher():
    source = Synthetic("tiny", num_samples=50_000)
    dense, row_ids, labels = all_samples(source, 50_000)
    logits = source._teacher.logits(dense.numpy(), row_ids.numpy())
    assert 0.84 < auc(labels, logits) < 0.90
    assert 0.2 < labels.mean() < 0.6


def test_impossible_sizes_are_refused():
    sizes = [{"size": ()}, {"size": (5, 0)}, {"size": "huge"}]
    for wrong in [*sizes, {"num_samples": 0}, {"num_dense": -1}, {"seed": -1}]:
        with pytest.raises(UsageError):
            Synthetic(**wrong)


def test_logits_sum_row_dense_and_pair_effects():
    teacher = PlantedTeacher((50_000, 20_000, 10), num_dense=2, seed=1)
    generator = np.random.default_rng(0)
    dense = generator.standard_normal((20_000, 2)).astype(np.float32)
    row_ids = np.stack([generator.integers(rows, size=20_000) for rows in (50_000, 20_000, 10)])
    logits = teacher.logits(dense, row_ids)

    def moved_by(table):
        other = row_ids.copy()
        other[table] = 0
        return float((teacher.logits(dense, other) - logits).std())

    assert moved_by(0) > 2 * moved_by(2) > 0
    assert (teacher.logits(np.zeros_like(dense), row_ids) - logits).std() == pytest.approx(
        0.4, abs=0.05
    )
    # A pair's effect is no sum of the effects of its rows.
    corners = np.array([[1, 1, 2, 2], [1, 2, 1, 2], [0, 0, 0, 0]])
    a, b, c, d = teacher.logits(np.zeros((4, 2), dtype=np.float32), corners)
    assert abs((a + d) - (b + c)) > 1e-3
