"""Snapshots of rounded rows: what is recovered from them, and what the report says of it."""

import json

import pytest
import torch
from safetensors import safe_open

import cpr_ext
from cpr_ext.errors import DamageError, NanError, SnapshotError, UsageError
from cpr_ext.state.precision import PRECISIONS, round_rows
from cpr_ext.storage.merge import MergeLimits, write_merged
from cpr_ext.storage.merge_plan import Merge
from cpr_ext.storage.newest_rows import NewestRows
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.segment_writer import Pace
from cpr_ext.storage.store_reader import open_segment
from cpr_ext.tools.maintenance import compact, verify
from python_tests.helpers import Trained, array_offset, assert_same, flip, shard_records

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
    run.checkpointer.save(kind="base")
    run.checkpointer.wait()
    before = run.rows()
    run.train(2)
    handle = run.checkpointer.save()
    run.checkpointer.wait()
    assert handle.kind == "partial"
    return run, before, run.rows()


def recovered(directory, **options):
    fresh = Trained(directory, seed=9, **{**OPTIONS, **options})
    report = fresh.checkpointer.recover()
    rows = fresh.rows()
    fresh.checkpointer.close()
    return report, rows


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
    options = {"precision": cpr_ext.Precision(partial=precision), "overlap": overlap}
    run, before, after = saved_twice(tmp_path, consistency="step", **options)
    run.die()
    report, rows = recovered(tmp_path)
    assert_same(rows, expected(before, after, precision))
    assert report.rows_rounded == num_different(rows, after) > 100
    error = max((rows[t]["weight"] - after[t]["weight"]).abs().max() for t in rows)
    assert 0 < error <= report.largest_rounding_error < 0.5


def test_bases_and_optimizer_state_are_rounded_only_if_asked_for(tmp_path):
    precision = cpr_ext.Precision(base="float16", partial="int8", state="bfloat16")
    run, before, after = saved_twice(tmp_path, precision=precision)
    run.die()
    base = {
        table: {
            name: round_rows(values, "float16" if name == "weight" else "bfloat16")
            for name, values in arrays.items()
        }
        for table, arrays in before.items()
    }
    moved = expected(before, after, "int8", "bfloat16")
    for table, arrays in base.items():
        still = (before[table]["weight"] == after[table]["weight"]).all(1)
        for name, values in arrays.items():
            moved[table][name][still] = values[still]
    report, rows = recovered(tmp_path)
    assert_same(rows, moved)
    assert report.rows_rounded == report.rows_restored == 690


def test_rows_that_break_the_bound_are_recovered_bit_for_bit(tmp_path):
    run = Trained(tmp_path, **OPTIONS, precision=cpr_ext.Precision(partial="int4"), on_nan="save")
    run.train(1)
    run.checkpointer.save(kind="base")
    run.checkpointer.wait()
    run.train(1)
    run.checkpointer.save(kind="partial")  # row 7 is rounded here, but not in the newest snapshot
    run.checkpointer.wait()
    with torch.no_grad():
        weight = run.model.tables["big"].weight
        weight[3, 2], weight[400, 0], weight[599, 15] = float("inf"), float("nan"), 3e38
        weight[7] = torch.linspace(1e-9, 2e-9, 16)
    run.checkpointer.save(kind="partial")
    run.checkpointer.wait()
    after = run.rows()
    run.die()
    report, rows = recovered(tmp_path, on_nan="save")
    exact = [3, 400, 7]
    weights = (each["tables.big"]["weight"] for each in (rows, after))
    assert_same(*(each[exact] for each in weights))
    assert report.rows_rounded == num_different(rows, after) > 100


def test_a_row_with_nan_is_refused_by_its_name(tmp_path):
    run = Trained(tmp_path, **OPTIONS, precision=cpr_ext.Precision(base="int8"))
    run.train(1)
    with torch.no_grad():
        run.model.tables["big"].weight[411, 5] = float("nan")
    run.checkpointer.save(kind="base")
    with pytest.raises(SnapshotError) as caught:
        run.checkpointer.wait()
    assert isinstance(caught.value.__cause__, NanError)
    assert "table 'tables.big', row 411: weight is NaN" in str(caught.value.__cause__)
    run.die()


def test_segments_of_rounded_rows_open_in_safetensors(tmp_path):
    run, _, _ = saved_twice(tmp_path, precision=cpr_ext.Precision(partial="int8"))
    run.die()
    paths = {r.kind: path for _, r, path in shard_records(run.store)}
    with safe_open(paths["partial"], "pt") as file:
        own = json.loads(file.metadata()["cpr_ext"])
        stored = file.get_tensor("tables.big/weight")
        assert (stored.dtype, stored.shape[1]) == (torch.uint8, 24)
        assert file.get_tensor("tables.thin/weight").dtype == torch.float32
        assert own["arrays"][own["tables"][0]["arrays"]][0] == ["weight", "F32", [16], "int8"]
        assert file.get_tensor("tables.big/row_ids").numel() <= 4096


def test_damage_costs_the_rows_of_its_chunk_alone(tmp_path):
    run, before, after = saved_twice(tmp_path, precision=cpr_ext.Precision(partial="int8"))
    run.die()
    wanted = expected(before, after, "int8")
    for _, record, path in list(shard_records(run.store)):
        if record.kind != "partial":
            continue
        for name in ("row_ids", "weight"):
            position = array_offset(path, f"tables.big/{name}") + 1
            flip(path, position)
            fresh = Trained(tmp_path, seed=9, **OPTIONS)
            with pytest.raises(DamageError):
                fresh.checkpointer.recover(on_damage="raise")
            report = fresh.checkpointer.recover(on_damage="fall_back")
            assert report.rows_stale is None or report.rows_stale + report.rows_possibly_stale > 0
            rows = fresh.rows()
            assert report.rows_rounded == num_different(rows, before, after) > 0
            for table, arrays in rows.items():
                for name, values in arrays.items():
                    same = (values == wanted[table][name]).reshape(len(values), -1).all(1)
                    old = (values == before[table][name]).reshape(len(values), -1).all(1)
                    assert bool((same | old).all())
            fresh.die()
            flip(path, position)
            break
        break


def merged_twice(directory, precisions, **options):
    """A run whose partial snapshots have these precisions; its rows recovered before and after."""
    options = {**OPTIONS, **options}
    for number, precision in enumerate(precisions):
        run = Trained(directory, **options, precision=cpr_ext.Precision(partial=precision))
        if number:
            run.checkpointer.recover()
        run.train(1)
        if not number:
            run.checkpointer.save(kind="base")
            run.checkpointer.wait()
        for _ in range(2):
            run.train(1)
            run.checkpointer.save()
            run.checkpointer.wait()
        run.die()
    return run


@pytest.mark.parametrize("precisions", [["int8"], ["int4", "int8"], ["bfloat16", "float32"]])
def test_compaction_into_a_base_keeps_the_values_that_a_recovery_gives(tmp_path, precisions):
    merged_twice(tmp_path, precisions)
    report, rows = recovered(tmp_path)
    compact(tmp_path)
    assert verify(tmp_path).is_sound
    after, merged = recovered(tmp_path)
    assert_same(merged, rows)
    # Although they are float32 in the file now.
    assert after.rows_rounded == report.rows_rounded > 0
    assert after.largest_rounding_error == report.largest_rounding_error


@pytest.mark.parametrize("precisions", [["int8"], ["int4", "int8"], ["int4", "float32"]])
def test_merged_partial_segments_have_the_bytes_of_their_sources(tmp_path, precisions):
    run = merged_twice(tmp_path, precisions, lookups=300)
    _, rows = recovered(tmp_path)
    manifest = run.store.shards[0]
    read = manifest.segments[1:]
    ranges = {name: (0, size // 2) for name, (size, _) in run_tables().items()}
    merged = write_merged(
        manifest, 0, ranges, Merge(read, read, "merged"), MergeLimits(1 << 16, 1 << 14), Pace()
    )
    assert len(read) == 2 * len(precisions)
    segment = open_segment(manifest, merged.record)
    weights = segment.layout.tables[0].arrays[0]
    if len(precisions) == 1:
        assert weights.precision == "int8"
        assert not segment.layout.exact_offsets
    source = SegmentRows(segment, ranges)
    for table in ranges:
        found = NewestRows(table, [source])
        row_ids = found.all_row_ids()
        block = found.chosen(row_ids)
        for name, values in block.arrays.items():
            assert_same(values, rows[table][name][row_ids])
    assert segment.rounded.num_rows > 0


def run_tables():
    return {f"tables.{name}": shape for name, shape in TABLES.items()}


def test_another_number_of_shards_takes_the_rounded_rows(tmp_path):
    run, before, after = saved_twice(tmp_path / "two", precision=cpr_ext.Precision(partial="int4"))
    run.die()
    other = Trained(tmp_path / "three", seed=9, **{**OPTIONS, "num_shards": 3})
    report = other.checkpointer.recover(from_store=tmp_path / "two")
    assert_same(other.rows(), expected(before, after, "int4"))
    assert report.rows_rounded == num_different(other.rows(), after) > 100
    other.checkpointer.close()


def test_without_rounding_a_recovery_reports_none(tmp_path):
    run, _, after = saved_twice(tmp_path)
    run.die()
    report, rows = recovered(tmp_path)
    assert_same(rows, after)
    assert (report.rows_rounded, report.largest_rounding_error) == (0, 0.0)


def test_a_precision_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"precision is 'int8'; needed: such as Precision"):
        Trained(tmp_path, precision="int8")
