"""Damage is found and named, and costs no more than the newest state of the rows it hit."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import DamageError
from cpr_ext.recovery.report import Findings
from cpr_ext.recovery.restore import newest_undamaged
from python_tests.helpers import (
    Trained,
    array_offset,
    assert_same,
    flip,
    flipped,
    read_chunks,
    row_records,
)

NUM_SHARDS = 2
TABLES = {"a": (60, 3)}
OPTIONS = {
    "num_shards": NUM_SHARDS,
    "optimizer": "sgd",
    "schedule": cpr_ext.EverySteps(1, when_busy="wait"),
    "priority": cpr_ext.AllRows(),
}


@pytest.fixture
def trained(tmp_path):
    """A store with a base and two partial snapshots; and the rows after each step."""
    run = Trained(tmp_path / "store", TABLES, lookups=12, **OPTIONS)
    rows = {}
    for step in (1, 2, 3):
        run.train(1)
        rows[step] = run.rows()["tables.a"]["weight"]
    run.checkpointer.wait()
    run.die()
    return run, rows


def recover(run):
    fresh = Trained(run.store.directory, TABLES, seed=9, **OPTIONS)
    return fresh, fresh.checkpointer.recover()


def segments(run, kind):
    return [(record, path) for record, path in row_records(run.store) if record.kind == kind]


def before_chunk(rows, chunk):
    """Rows of step 3, but those of a chunk, which are of step 2."""
    expected = rows[3].clone()
    expected[chunk.row_ids] = rows[2][chunk.row_ids]
    return expected


@pytest.mark.parametrize("how", ["header", "missing", "cut", "grown"])
def test_a_segment_without_a_usable_header_is_passed_over_as_a_whole(trained, how):
    run, rows = trained
    record, path = segments(run, "partial")[-1]
    (chunk,) = read_chunks(path)
    if how == "header":
        flip(path, 100)
    elif how == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-8] if how == "cut" else data + b"more")
    fresh, report = recover(run)
    (damaged,) = report.damaged_segments
    assert (damaged.path, damaged.num_rows) == (path, -1)
    assert str(path) in damaged.reason
    # Which rows it held is not known: none is called older for it.
    assert (report.rows_stale, report.rows_possibly_stale) == (0, 60)
    assert_same(fresh.rows()["tables.a"]["weight"], before_chunk(rows, chunk))
    assert record.snapshot == 3


def test_a_damaged_base_costs_only_the_rows_that_no_newer_segment_holds(trained):
    run, rows = trained
    _, path = segments(run, "base")[0]
    flip(path, 0)
    newer = torch.cat([read_chunks(p)[0].row_ids for _, p in segments(run, "partial")])
    fresh, report = recover(run)
    assert [damaged.path for damaged in report.damaged_segments] == [path]
    missing = sorted(set(range(60)) - set(newer.tolist()))
    assert report.missing_rows["tables.a"].tolist() == missing
    assert report.rows_missing == len(missing) > 0
    assert report.rows_restored == 60 - len(missing)
    assert (report.rows_stale, report.rows_possibly_stale) == (0, 0)
    live = fresh.rows()["tables.a"]["weight"]
    assert_same(live[newer], rows[3][newer])


def test_damage_in_lost_shards_is_reported_in_a_live_model_too(tmp_path):
    """Ranges that do not follow one another share a chunk, which is damaged once."""
    run = Trained(tmp_path, TABLES, lookups=12, **OPTIONS | {"num_shards": 6})
    run.train(3)
    run.checkpointer.wait()
    before = run.rows()["tables.a"]["weight"]
    _, path = segments(run, "partial")[-1]
    flip(path, array_offset(path, "tables.a/weight"))
    report = run.checkpointer.recover(shards=[0, 2, 5])
    (damaged,), (chunk,) = report.damaged_segments, read_chunks(path)
    assert (damaged.path, damaged.num_rows) == (path, len(chunk.row_ids))
    is_lost = torch.isin(torch.arange(60) // 10, torch.tensor([0, 2, 5]))
    assert report.rows_stale == int(is_lost[chunk.row_ids].sum()) > 0
    assert_same(run.rows()["tables.a"]["weight"][~is_lost], before[~is_lost])


def test_training_goes_on_when_damage_took_all_per_row_state(tmp_path):
    run = Trained(tmp_path, TABLES, **OPTIONS | {"optimizer": "sparse_adam"})
    run.train(3)
    run.checkpointer.wait()
    run.die()
    for _, path in row_records(run.store):
        flip(path, 100)
    fresh = Trained(tmp_path, TABLES, seed=9, **OPTIONS | {"optimizer": "sparse_adam"})
    report = fresh.checkpointer.recover()
    assert (report.step, report.rows_restored, report.rows_missing) == (3, 0, 60)
    fresh.train(1)


def test_without_any_good_dense_part_recovery_says_which_is_damaged_and_changes_nothing(trained):
    run, _ = trained
    for record in run.store.manifest.dense:
        flip(run.store.path_of(record), record.header_bytes + 1)
    files = {path: path.read_bytes() for path in run.store.directory.rglob("*.safetensors")}
    fresh = Trained(run.store.directory, TABLES, seed=9, **OPTIONS)
    before = fresh.state()
    for mode in ("partial", "full"):
        with pytest.raises(DamageError, match=r"no undamaged dense part is left.*dense\.safe"):
            fresh.checkpointer.recover(mode=mode)
    assert_same(fresh.state(), before)
    assert {p: p.read_bytes() for p in run.store.directory.rglob("*.safetensors")} == files


def test_a_damaged_manifest_is_named_and_nothing_is_removed(trained):
    run, _ = trained
    path = run.store.directory / "MANIFEST.json"
    files = sorted(run.store.directory.rglob("*.safetensors"))
    for position in range(0, path.stat().st_size, 7):
        with flipped(path, position, bit=position % 8):
            with pytest.raises(DamageError, match=path.name) as damage:
                Trained(run.store.directory, TABLES, **OPTIONS)
            assert str(path) in str(damage.value)
    assert sorted(run.store.directory.rglob("*.safetensors")) == files


def test_bytes_of_a_small_store_are_checked_on_the_way_in(tmp_path):
    """One table of a few rows: any flipped byte of any file is told, or changes nothing."""
    options = {**OPTIONS, "num_shards": 1, "schedule": cpr_ext.EverySteps(100), "lookups": 2}
    options["staging"] = cpr_ext.StagingOptions(direct_io=False)
    run = Trained(tmp_path / "store", {"a": (4, 2)}, **options)
    run.train(1)
    run.checkpointer.wait()
    run.train(1)
    run.save()
    state = run.state()
    run.die()
    live = Trained(tmp_path / "store", {"a": (4, 2)}, **options)
    recovering = live.checkpointer
    assert recovering.recover().damaged_segments == []
    assert_same(live.state(), state)
    # Spaces of the header block and zeros of the pads are bytes like any other.
    num_flipped = 0
    for record, path in row_records(live.store):
        for position in range(record.file_bytes):
            with flipped(path, position, bit=position % 8):
                report = recovering.recover(shards=[0])
            assert [damaged.path for damaged in report.damaged_segments] == [path], position
            num_flipped += 1
    assert num_flipped > 1000
    (record,) = [r for r in live.store.manifest.dense if r.snapshot == 2]
    path = live.store.path_of(record)
    for position in range(0, record.file_bytes, 251):
        findings = Findings()
        with flipped(path, position, bit=position % 8), pytest.raises(DamageError):
            newest_undamaged(live.store.view(), [record], findings)
        assert [damaged.path for damaged in findings.damaged_segments] == [path]
    assert recovering.recover().damaged_segments == []
    recovering._release()
