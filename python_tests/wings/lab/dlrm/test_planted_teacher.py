import numpy as np
import pytest

from cpr_ext.wings.lab.dlrm.synthetic import PlantedTeacher


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
