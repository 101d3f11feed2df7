"""Data sources: which there are, and what all of them promise."""

from collections.abc import Callable

import pytest
import torch

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.batch import DataSource
from cpr_ext.wings.lab.dlrm.criteo import Criteo, find_criteo_files
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.presets import PRESETS, ModelPreset, find_preset
from cpr_ext.wings.lab.dlrm.sources import open_source
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

TINY = find_preset("tiny")


def test_spec_opens_the_source_it_names(criteo_file, movietweetings_folder):
    assert isinstance(open_source("synthetic", TINY, seed=3), Synthetic)
    assert isinstance(open_source(f"movietweetings:{movietweetings_folder}", TINY), MovieTweetings)
    criteo = open_source(f"criteo:{criteo_file}", TINY)
    assert isinstance(criteo, Criteo)
    assert criteo.num_embeddings == TINY.criteo_num_embeddings


def test_what_is_no_source_is_refused_with_what_is_allowed(tmp_path):
    for spec in ("", "criteo", "criteo:", "movietweetings:", "synthetic:x", "avazu:y"):
        with pytest.raises(UsageError) as caught:
            open_source(spec, TINY)
        assert repr(spec) in str(caught.value)
        assert "synthetic, criteo:PATH, movietweetings:PATH" in str(caught.value)
    with pytest.raises(DataError, match="a:b"):  # a path may hold a colon
        open_source(f"criteo:{tmp_path}/a:b", TINY)
    for place in (tmp_path / "nothing.txt", tmp_path):
        with pytest.raises(DataError, match=r"no such file, and no folder with train\.txt"):
            find_criteo_files(place)
    for name in ("day_10.gz", "day_2", "day_2.gz", "day_x"):
        (tmp_path / name).touch()
    assert [file.name for file in find_criteo_files(tmp_path)] == ["day_2", "day_10.gz"]
    (tmp_path / "train.txt.gz").touch()
    assert [file.name for file in find_criteo_files(tmp_path)] == ["train.txt.gz"]
    with pytest.raises(UsageError, match="'huge'; allowed: tiny, kaggle, terabyte"):
        find_preset("huge")


def test_published_sizes_add_up_and_a_row_cap_bounds_larger_tables_only():
    # 33,762,577 rows are the published total of the Kaggle set.
    assert sum(PRESETS["kaggle"].criteo_num_embeddings) == 33_762_577
    assert max(PRESETS["terabyte"].criteo_num_embeddings) == 10_000_000
    assert PRESETS["terabyte"].criteo_num_embeddings.count(10_000_000) == 5
    own = ModelPreset("own", 8, (13, 8), (4, 1), 100, (5, 100, 101), (7,))
    assert own.criteo_num_embeddings == (5, 100, 100)


# --- what every data source promises to a training loop ---


@pytest.fixture(params=["synthetic", "movietweetings", "criteo"])
def make_source(request, criteo_file, movietweetings_folder):
    makers: dict[str, Callable[[], DataSource]] = {
        "synthetic": lambda: Synthetic((500, 40, 1), num_samples=10_000),
        "movietweetings": lambda: MovieTweetings(movietweetings_folder),
        "criteo": lambda: Criteo(criteo_file, TINY.criteo_num_embeddings),
    }
    return makers[request.param]


def test_shapes_dtypes_and_row_ids_are_in_bounds(make_source):
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


def test_samples_of_an_epoch_are_all_there_and_the_last_batch_may_be_short(make_source):
    source = make_source()
    sizes = [batch.batch_size for batch in source.train_batches(37)]
    assert set(sizes[:-1]) == {37}
    assert 0 < sizes[-1] < 37, "choose another batch size: it must not divide the samples"
    one_by_one = sum(1 for _ in source.train_batches(1))
    assert sum(sizes) == one_by_one
    assert source.num_train_samples in (None, one_by_one)
    assert sum(batch.batch_size for batch in source.test_batches(37)) > 0


def test_batches_past_the_end_are_none_and_impossible_ones_refused_at_the_call(make_source):
    source = make_source()
    assert list(source.train_batches(37, first_batch=10_000)) == []
    for batch_size, first_batch in ((0, 0), (-3, 0), (10, -1)):
        with pytest.raises(UsageError, match=f"batch_size is {batch_size}"):
            source.train_batches(batch_size, first_batch=first_batch)
