"""The model learns, and losing rows shows: what every experiment on recovery rests on."""

from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr_ext.lab.dlrm import DLRM, DataSource, build_optimizers, evaluate, find_preset, initial_rows
from cpr_ext.lab.dlrm.evaluation import Evaluation
from cpr_ext.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.lab.dlrm.synthetic import Synthetic

NUM_SHARDS = 8
LOST_SHARDS = (0, 2, 4, 6)


def lose_half(model: DLRM, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(99)
    for bag in model.tables.values():
        rows, dim = bag.weight.shape
        for shard in LOST_SHARDS:
            lost = slice(shard * rows // NUM_SHARDS, (shard + 1) * rows // NUM_SHARDS)
            with torch.no_grad():
                bag.weight[lost] = initial_rows(rows, lost.stop - lost.start, dim, generator)
            optimizer.state[bag.weight]["sum"][lost] = 0.0


def train_one_epoch(source: DataSource, *, lose_rows_at: float | None = None) -> Evaluation:
    settings = source.recommended
    model = DLRM.from_preset(find_preset("tiny"), source)
    optimizers = build_optimizers(model, settings)
    assert source.num_train_samples is not None
    num_steps = -(-source.num_train_samples // settings.batch_size)
    for step, batch in enumerate(source.train_batches(settings.batch_size)):
        if lose_rows_at is not None and step == int(lose_rows_at * num_steps):
            lose_half(model, optimizers[0])
        for optimizer in optimizers:
            optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        for optimizer in optimizers:
            optimizer.step()
    return evaluate(model, source)


def test_synthetic_source_is_learned_and_losing_half_of_the_rows_shows() -> None:
    source = Synthetic("tiny")
    whole, lost = train_one_epoch(source), train_one_epoch(source, lose_rows_at=0.95)
    assert 0.78 < whole.auc < source.teacher_auc
    assert lost.auc < whole.auc - 0.02
    assert lost.logloss > whole.logloss
    assert whole.num_samples == source.num_test_samples


def test_movietweetings_is_learned_and_losing_half_of_the_rows_shows(
    real_movietweetings: Path,
) -> None:
    source = MovieTweetings(real_movietweetings)
    whole, lost = train_one_epoch(source), train_one_epoch(source, lose_rows_at=0.95)
    assert whole.auc >= 0.79
    assert lost.auc < whole.auc - 0.02
    assert lost.logloss > whole.logloss
