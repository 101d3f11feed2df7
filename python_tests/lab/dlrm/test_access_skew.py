import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpr_ext.lab.dlrm.access_skew as access_skew_module
from cpr_ext.lab.dlrm.access_skew import production_skew

YEARS = ["2021", "2022"]


@pytest.mark.parametrize("year", YEARS)
def test_shares_sum_to_one_and_hotter_buckets_are_hotter_per_row(year: str) -> None:
    skew = production_skew(year)
    assert skew.row_share.sum() == pytest.approx(1.0)
    assert skew.access_share.sum() == pytest.approx(1.0)
    assert bool((np.diff(skew.access_share / skew.row_share) < 0).all())


@pytest.mark.parametrize("year", YEARS)
def test_published_shares_are_kept(year: str) -> None:
    file = Path(access_skew_module.__file__).with_name("access_locality.json")
    published = json.loads(file.read_text())["years"][year]
    skew = production_skew(year)
    # Three digits are published, and the shares are scaled to sum to 1.
    assert skew.row_share[::-1] == pytest.approx(published["row_share"], abs=1.5e-3)
    assert skew.access_share[::-1] == pytest.approx(published["access_share"], abs=1.5e-3)


def test_statistics_name_their_source_and_licence() -> None:
    file = Path(access_skew_module.__file__).with_name("access_locality.json")
    source = json.loads(file.read_text())["source"]
    assert "facebookresearch/dlrm_datasets" in source
    assert "MIT" in source


@pytest.mark.parametrize("year", YEARS)
def test_drawn_rows_have_the_skew_of_the_statistics(year: str) -> None:
    skew = production_skew(year)
    num_embeddings, num_draws = 1_000_000, 2_000_000
    ranks = skew.ranks(np.random.default_rng(0).random(num_draws), num_embeddings)
    counts = np.bincount(ranks, minlength=num_embeddings)
    last_row = np.round(np.cumsum(skew.row_share) * num_embeddings).astype(np.int64)
    drawn_share = np.add.reduceat(counts, np.concatenate(([0], last_row[:-1]))) / num_draws
    # The hottest buckets are a few rows wide, so that their edges fall between rows.
    assert np.cumsum(drawn_share)[2:] == pytest.approx(np.cumsum(skew.access_share)[2:], abs=5e-3)


@settings(max_examples=50, deadline=None)
@given(
    uniform=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=20),
    num_embeddings=st.integers(1, 10_000),
)
def test_ranks_are_in_the_table_and_keep_the_order(
    uniform: list[float], num_embeddings: int
) -> None:
    ranks = production_skew().ranks(np.sort(uniform), num_embeddings)
    assert ranks.min() >= 0
    assert ranks.max() < num_embeddings
    assert bool((np.diff(ranks) >= 0).all())
