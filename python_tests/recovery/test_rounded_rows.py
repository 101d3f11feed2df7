"""Snapshots of rounded rows: what is recovered from them, and what the report says of it."""

import pytest
import torch

import cpr_ext
from cpr_ext import Precision, StoreOptions
from cpr_ext.errors import DamageError, NanError, SnapshotError
from cpr_ext.state.precision import PRECISIONS, round_rows
from python_tests.helpers import Trained, array_offset, assert_same, flipped, row_records

TABLES = {"big": (600, 16), "wide": (50, 33), "thin": (40, 2)}
OPTIONS = {
    "tables": TABLES,
    "schedule": cpr_ext.EverySteps(10**9),
    "priority": cpr_ext.AllRows(),
    "num_shards": 2,
    "lookups": 120,
}


def expected(before, after, weights="float32", state="float32"):
    """Rows as they are recovered: of a base of ``before``, and those that changed since rounded."""
    rows = {}
    for table, arrays in after.items():
        moved = (arrays["weight"] != before[table]["weight"]).any(1)
        rows[table] = {}
        for name, values in arrays.items():
            precision = weights if name == "weight" else state
            recovered = before[table][name].clone()
            recovered[moved] = round_rows(values[moved], precision)
            rows[table][name] = recovered
    return rows


def saved_twice(directory, **options):
    """A run with a base and a partial snapshot, and its rows at each."""
    run = Trained(directory, **{**OPTIONS, **options})
    run.train(2)
    run.save("base")
    before = run.rows()
    run.train(2)
    assert run.save().kind == "partial"
    return run, before, run.rows()


def num_different(rows, *others):
    """How many rows differ from each in a bit of a weight: of random ones, those that are rounded.

    Rounding changes a bit of almost every row.
    """
    count = 0
    for table in rows:
        held = [each[table]["weight"].view(torch.int32) for each in (rows, *others)]
        count += int(torch.stack([(held[0] != each).any(1) for each in held[1:]]).all(0).sum())
    return count


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_changed_rows_are_recovered_rounded_and_all_others_bit_for_bit(
    tmp_path, precision, overlap
):
    options = {"store": StoreOptions(precision=Precision(partial=precision)), "overlap": overlap}
    run, before, after = saved_twice(tmp_path, **options)
    run.die()
    fresh = Trained(tmp_path, seed=9, **OPTIONS)
    report, rows = fresh.checkpointer.recover(), fresh.rows()
    assert_same(rows, expected(before, after, precision))
    assert report.rows_rounded >= num_different(rows, after) > 100


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


def test_damage_costs_the_rows_of_its_chunk_alone(tmp_path):
    options = {"store": StoreOptions(precision=Precision(partial="int8"))}
    run, before, after = saved_twice(tmp_path, **options)
    run.die()
    wanted = expected(before, after, "int8")
    (path,) = [path for record, path in row_records(run.store) if record.kind == "partial"]
    for name in ("row_ids", "weight"):
        with flipped(path, array_offset(path, f"tables.big/{name}") + 1):
            fresh = Trained(tmp_path, seed=9, **OPTIONS)
            with pytest.raises(DamageError):
                fresh.checkpointer.recover(on_damage="raise")
            report = fresh.checkpointer.recover(on_damage="fall_back")
            assert report.rows_stale is None or report.rows_stale + report.rows_possibly_stale > 0
            rows = fresh.rows()
            assert report.rows_rounded >= num_different(rows, before, after) > 0
            for table, arrays in rows.items():
                for array, values in arrays.items():
                    same = (values == wanted[table][array]).reshape(len(values), -1).all(1)
                    old = (values == before[table][array]).reshape(len(values), -1).all(1)
                    assert bool((same | old).all())
            fresh.die()


def test_another_number_of_shards_takes_the_rounded_rows(tmp_path):
    run, before, after = saved_twice(
        tmp_path / "two", store=StoreOptions(precision=Precision(partial="int8"))
    )
    run.die()
    other = Trained(tmp_path / "three", seed=9, **{**OPTIONS, "num_shards": 3})
    report = other.checkpointer.recover(from_store=tmp_path / "two")
    assert_same(other.rows(), expected(before, after, "int8"))
    assert report.rows_rounded >= num_different(other.rows(), after) > 100
    other.checkpointer.close()
