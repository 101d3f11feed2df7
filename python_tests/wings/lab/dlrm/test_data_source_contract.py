"""What every data source promises to a training loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.criteo import Criteo
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

TINY = find_preset("tiny").criteo_num_embeddings


@pytest.fixture(params=["synthetic", "movietweetings", "criteo"])
def make_source(
    request: pytest.FixtureRequest, criteo_file: Path, movietweetings_folder: Path
) -> Callable[[], DataSource]:
    makers: dict[str, Callable[[], DataSource]] = {
        "synthetic": lambda: Synthetic((500, 40, 1), num_samples=10_000),
        "movietweetings": lambda: MovieTweetings(movietweetings_folder),
        "criteo": lambda: Criteo(criteo_file, TINY),
    }
    return makers[request.param]


def test_shapes_dtypes_and_row_ids_are_in_bounds(make_source: Callable[[], DataSource]) -> None:
    source = make_source()
    for batch in [*source.train_batches(37), *source.test_batches(37)]:
        size = batch.batch_size
        assert batch.dense.shape == (size, source.num_dense)
        assert batch.labels.shape == (size,)
        assert batch.dense.dtype == batch.labels.dtype == torch.float32
        assert set(batch.labels.tolist()) <= {0.0, 1.0}
        assert len(batch.indices) == len(batch.offsets) == len(source.table_names)
        for indices, offsets, rows in zip(
            batch.indices, batch.offsets, source.num_embeddings, strict=True
        ):
            assert indices.dtype == offsets.dtype == torch.int64
            assert offsets.shape == (size,)
            assert offsets[0] == 0
            assert bool((offsets.diff() >= 0).all())
            assert int(offsets[-1]) <= len(indices)
            assert len(indices) == 0 or 0 <= int(indices.min()) <= int(indices.max()) < rows


def test_samples_of_an_epoch_are_all_there_and_the_last_batch_may_be_short(
    make_source: Callable[[], DataSource],
) -> None:
    source = make_source()
    sizes = [batch.batch_size for batch in source.train_batches(37)]
    assert set(sizes[:-1]) == {37}
    assert 0 < sizes[-1] < 37, "choose another batch size: it must not divide the samples"
    one_by_one = sum(1 for _ in source.train_batches(1))
    assert sum(sizes) == one_by_one
    assert source.num_train_samples in (None, one_by_one)
    assert sum(batch.batch_size for batch in source.test_batches(37)) > 0


def test_first_batch_past_the_end_gives_none(make_source: Callable[[], DataSource]) -> None:
    assert list(make_source().train_batches(37, first_batch=10_000)) == []


@pytest.mark.parametrize(("batch_size", "first_batch"), [(0, 0), (-3, 0), (10, -1)])
def test_impossible_batches_are_refused_at_the_call(
    make_source: Callable[[], DataSource], batch_size: int, first_batch: int
) -> None:
    with pytest.raises(UsageError, match=f"batch_size is {batch_size}"):
        make_source().train_batches(batch_size, first_batch=first_batch)


def test_clean_data_give_no_warnings(make_source: Callable[[], DataSource]) -> None:
    source = make_source()
    for _ in [*source.train_batches(100), *source.test_batches(100)]:
        pass
    assert source.warnings() == []
