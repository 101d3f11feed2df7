from pathlib import Path

import pytest

from cpr_ext.errors import DataError, UsageError
from cpr_ext.wings.lab.dlrm.criteo import Criteo
from cpr_ext.wings.lab.dlrm.movietweetings import MovieTweetings
from cpr_ext.wings.lab.dlrm.presets import find_preset
from cpr_ext.wings.lab.dlrm.sources import open_source
from cpr_ext.wings.lab.dlrm.synthetic import Synthetic

TINY = find_preset("tiny")


def test_spec_opens_the_source_it_names(criteo_file: Path, movietweetings_folder: Path) -> None:
    assert isinstance(open_source("synthetic", TINY, seed=3), Synthetic)
    assert isinstance(open_source(f"movietweetings:{movietweetings_folder}", TINY), MovieTweetings)
    criteo = open_source(f"criteo:{criteo_file}", TINY)
    assert isinstance(criteo, Criteo)
    assert criteo.num_embeddings == TINY.criteo_num_embeddings


def test_path_may_hold_a_colon(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a:b"):
        open_source(f"criteo:{tmp_path}/a:b", TINY)


@pytest.mark.parametrize(
    "spec", ["", "criteo", "criteo:", "movietweetings", "movietweetings:", "synthetic:x", "avazu:y"]
)
def test_unknown_spec_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_source(spec, TINY)
    assert repr(spec) in str(caught.value)
    assert "synthetic, criteo:PATH, movietweetings:PATH" in str(caught.value)
