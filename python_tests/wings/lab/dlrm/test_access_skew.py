import json
from pathlib import Path

import numpy as np
import pytest

import cpr_ext.wings.lab.dlrm.synthetic as access_skew_module
from cpr_ext.wings.lab.dlrm.synthetic import production_skew

YEARS = ["2021", "2022"]


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
