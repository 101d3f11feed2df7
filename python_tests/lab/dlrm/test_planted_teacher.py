import numpy as np
import pytest

from cpr_ext.lab.dlrm.planted_teacher import PlantedTeacher, row_effects

ROWS = np.arange(200_000)


def test_row_effects_have_mean_zero_and_variance_one() -> None:
    effects = row_effects(ROWS, table=3, effect=0, seed=0)
    assert effects.mean() == pytest.approx(0.0, abs=0.01)
    assert effects.var() == pytest.approx(1.0, abs=0.01)
    assert np.abs(effects).max() <= np.sqrt(3.0)


def test_row_effects_depend_on_nothing_but_row_table_effect_and_seed() -> None:
    effects = row_effects(ROWS, table=3, effect=0, seed=0)
    shuffled = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(effects[shuffled], row_effects(shuffled, table=3, effect=0, seed=0))


@pytest.mark.parametrize("change", [{"table": 4}, {"effect": 1}, {"seed": 1}, {"table": -1}])
def test_effects_of_different_kinds_are_independent(change: dict[str, int]) -> None:
    kind = {"table": 3, "effect": 0, "seed": 0}
    left, right = row_effects(ROWS, **kind), row_effects(ROWS, **(kind | change))
    assert abs(np.corrcoef(left, right)[0, 1]) < 0.01


def test_neighbouring_rows_are_independent() -> None:
    effects = row_effects(ROWS, table=0, effect=0, seed=0)
    assert abs(np.corrcoef(effects[1:], effects[:-1])[0, 1]) < 0.01


def test_logits_sum_row_dense_and_pair_effects() -> None:
    teacher = PlantedTeacher((50_000, 20_000, 10), num_dense=2, seed=1)
    generator = np.random.default_rng(0)
    dense = generator.standard_normal((20_000, 2)).astype(np.float32)
    row_ids = np.stack([generator.integers(rows, size=20_000) for rows in (50_000, 20_000, 10)])
    logits = teacher.logits(dense, row_ids)

    def moved_by(table: int) -> float:
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


def test_one_small_table_and_no_dense_features_are_enough() -> None:
    logits = PlantedTeacher((3,), num_dense=0, seed=0).logits(
        np.empty((4, 0), dtype=np.float32), np.array([[0, 1, 2, 0]])
    )
    assert logits[0] == logits[3]
    assert len(set(logits.tolist())) == 3
