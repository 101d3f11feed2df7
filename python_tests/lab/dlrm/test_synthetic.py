import numpy as np
import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.lab.dlrm.presets import find_preset
from cpr_ext.lab.dlrm.synthetic import Synthetic

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


def test_blocks_of_samples_differ() -> None:
    dense, indices, _ = all_samples(Synthetic((1000, 10), num_samples=2 * BLOCK), BLOCK)
    assert not torch.equal(dense[:BLOCK], dense[BLOCK:])
    assert not torch.equal(indices[:, :BLOCK], indices[:, BLOCK:])


def test_another_seed_gives_other_samples() -> None:
    left, right = (all_samples(Synthetic((1000,), 2000, seed=seed), 2000) for seed in (0, 1))
    assert not any(map(torch.equal, left, right))


def test_preset_gives_the_table_sizes() -> None:
    assert Synthetic("tiny").num_embeddings == find_preset("tiny").synthetic_num_embeddings
    kaggle = Synthetic("kaggle", num_samples=100)
    assert kaggle.num_embeddings == find_preset("kaggle").criteo_num_embeddings
    batch = next(kaggle.train_batches(100))
    assert max(int(indices.max()) for indices in batch.indices) > 1_000_000


def test_a_few_large_tables_hold_99_percent_of_the_rows() -> None:
    sizes = sorted(Synthetic("tiny").num_embeddings, reverse=True)
    assert sum(sizes[:3]) >= 0.99 * sum(sizes)
    assert len(sizes) >= 8


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


@pytest.mark.parametrize("rows", [1, 2, 6, 24, 100])
def test_every_row_of_a_table_can_be_drawn(rows: int) -> None:
    _, indices, _ = all_samples(Synthetic((rows,), num_samples=60_000), 60_000)
    assert len(indices.unique()) == rows


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
