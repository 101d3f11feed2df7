import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.dlrm.presets import PRESETS, ModelPreset, find_preset


def make(bottom_mlp: tuple[int, ...] = (13, 8), top_mlp: tuple[int, ...] = (4, 1)) -> ModelPreset:
    return ModelPreset("own", 8, bottom_mlp, top_mlp, 100, (5, 100, 101), (7,))


def test_published_sizes_add_up() -> None:
    # 33,762,577 rows are the published total of the Kaggle set.
    assert sum(PRESETS["kaggle"].criteo_num_embeddings) == 33_762_577
    assert max(PRESETS["terabyte"].criteo_num_embeddings) == 10_000_000
    assert PRESETS["terabyte"].criteo_num_embeddings.count(10_000_000) == 5


def test_row_cap_bounds_the_tables_that_exceed_it_only() -> None:
    assert make().criteo_num_embeddings == (5, 100, 100)


def test_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="'huge'; allowed: tiny, kaggle, terabyte"):
        find_preset("huge")
