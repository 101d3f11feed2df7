"""Snapshots of rounded rows: what is recovered from them, and what the report says of it."""

import pytest
import torch

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.errors import NanError, SnapshotError
from cpr_ext.state.precision import PRECISIONS, round_rows
from python_tests.helpers import Trained, assert_same

TABLES = {"big": (600, 16), "wide": (50, 33), "thin": (40, 2)}
OPTIONS = {
    "tables": TABLES,
    "schedule": cpr_ext.EverySteps(10**9),
    "priority": cpr_ext.AllRows(),
    "num_shards": 2,
    "lookups": 120,
}


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_changed_rows_are_recovered_rounded_and_all_others_bit_for_bit(
    tmp_path, precision, overlap
):
    options = {"store": StoreOptions(precision=Precision(partial=precision)), "overlap": overlap}
    run = Trained(tmp_path, **OPTIONS, **options)
    run.train(2)
    run.save("base")
    before = run.rows()
    run.train(2)
    assert run.save().kind == "partial"
    after, num_moved = run.rows(), 0
    run.die()
    fresh = Trained(tmp_path, seed=9, **OPTIONS)
    report, rows = fresh.checkpointer.recover(), fresh.rows()
    for table, arrays in after.items():
        moved = (arrays["weight"] != before[table]["weight"]).any(1)
        num_moved += int((rows[table]["weight"] != arrays["weight"]).any(1).sum())
        for name, values in arrays.items():
            expected = before[table][name].clone()
            expected[moved] = round_rows(
                values[moved], precision if name == "weight" else "float32"
            )
            assert_same(rows[table][name], expected)
    assert report.rows_rounded >= num_moved > 100  # rounding changes a bit of almost every row


def test_a_row_with_nan_is_refused_by_its_name(tmp_path):
    run = Trained(tmp_path, **OPTIONS, store=StoreOptions(precision=Precision(base="int8")))
    run.train(1)
    with torch.no_grad():
        run.model.tables["big"].weight[411, 5] = float("nan")
    run.checkpointer.save(kind="base")
    with pytest.raises(SnapshotError) as caught:
        run.checkpointer.wait()
    assert isinstance(caught.value.__cause__, NanError)
    assert "table 'tables.big', row 411: weight is NaN or infinite" in str(caught.value.__cause__)
    run.die()
