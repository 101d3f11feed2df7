"""Damage is found and named, and costs no more than the newest state of the rows it hit."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import DamageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.restore import newest_undamaged
from python_tests.helpers import (
    Trained,
    array_offset,
    assert_same,
    differences,
    flip,
    flipped,
    read_chunks,
    shard_records,
)

NUM_SHARDS = 2
TABLES = {"a": (60, 3)}
OPTIONS = {
    "num_shards": NUM_SHARDS,
    "consistency": "step",
    "when_busy": "wait",
    "optimizer": "sgd",
    "schedule": cpr_ext.EverySteps(1),
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


def recover(run, mode="partial", seed=9):
    fresh = Trained(run.store.directory, TABLES, seed=seed, **OPTIONS)
    report = fresh.checkpointer.recover(mode=mode)
    return fresh, report


def segments(run, shard, kind):
    return [
        (record, path)
        for number, record, path in shard_records(run.store)
        if number == shard and record.kind == kind
    ]


def test_damaged_rows_fall_back_to_their_older_state_and_all_others_stay_newest(trained):
    run, rows = trained
    _, path = segments(run, 0, "partial")[-1]
    (chunk,) = read_chunks(path)
    flip(path, array_offset(path, "tables.a/weight") + 5)
    fresh, report = recover(run)
    (damaged,) = report.damaged_segments
    assert damaged.path == path
    assert "checksum" in damaged.reason
    assert damaged.num_rows == len(chunk.row_ids) == report.rows_stale > 0
    expected = rows[3].clone()
    expected[chunk.row_ids] = rows[2][chunk.row_ids]
    assert_same(fresh.rows()["tables.a"]["weight"], expected)
    assert differences(expected, rows[3])
    fresh.checkpointer.close()


@pytest.mark.parametrize("how", ["header", "missing", "cut", "grown"])
def test_a_segment_without_a_usable_header_is_passed_over_as_a_whole(trained, how):
    run, rows = trained
    record, path = segments(run, 0, "partial")[-1]
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
    expected = rows[3].clone()
    expected[chunk.row_ids] = rows[2][chunk.row_ids]
    assert_same(fresh.rows()["tables.a"]["weight"], expected)
    assert record.snapshot == 3
    fresh.checkpointer.close()


def test_a_damaged_row_id_does_not_send_a_row_elsewhere(trained):
    run, rows = trained
    record, path = segments(run, 0, "partial")[-1]
    (chunk,) = read_chunks(path)
    flip(path, record.header_bytes, bit=3)
    fresh, report = recover(run)
    assert len(report.damaged_segments) == 1
    expected = rows[3].clone()
    expected[chunk.row_ids] = rows[2][chunk.row_ids]
    assert_same(fresh.rows()["tables.a"]["weight"], expected)
    fresh.checkpointer.close()


def test_a_damaged_base_costs_only_the_rows_that_no_newer_segment_holds(trained):
    run, rows = trained
    _, path = segments(run, 1, "base")[0]
    flip(path, 0)
    newer = torch.cat([read_chunks(p)[0].row_ids for _, p in segments(run, 1, "partial")])
    fresh, report = recover(run)
    assert [damaged.path for damaged in report.damaged_segments] == [path]
    missing = sorted(set(range(30, 60)) - set(newer.tolist()))
    assert report.missing_rows["tables.a"].tolist() == missing
    assert report.rows_missing == len(missing) > 0
    assert report.rows_restored == 60 - len(missing)
    assert (report.rows_stale, report.rows_possibly_stale) == (0, 0)
    live = fresh.rows()["tables.a"]["weight"]
    assert_same(live[:30], rows[3][:30])
    assert_same(live[newer], rows[3][newer])
    fresh.checkpointer.close()


def test_damage_in_a_lost_shard_is_reported_in_a_live_model_too(tmp_path):
    run = Trained(tmp_path, TABLES, lookups=12, **OPTIONS)
    run.train(3)
    run.checkpointer.wait()
    before = run.rows()["tables.a"]["weight"]
    _, path = segments(run, 0, "partial")[-1]
    flip(path, array_offset(path, "tables.a/weight"))
    report = run.checkpointer.recover(shards=[0])
    assert [damaged.path for damaged in report.damaged_segments] == [path]
    assert report.rows_stale == report.damaged_segments[0].num_rows > 0
    assert_same(run.rows()["tables.a"]["weight"][30:], before[30:])
    run.checkpointer.close()


@pytest.mark.parametrize("shards", [None, [0]])
def test_after_damage_the_next_snapshot_is_a_base_that_leaves_the_damaged_segment_behind(
    tmp_path, shards
):
    """Rows that kept an older state count as saved: a partial snapshot would not hold them."""
    run = Trained(tmp_path, TABLES, lookups=12, **OPTIONS)
    run.train(3)
    run.checkpointer.wait()
    _, path = segments(run, 0, "partial")[-1]
    flip(path, array_offset(path, "tables.a/weight"))
    if shards is None:
        run.die()
        run, _ = recover(run)
    else:
        run.checkpointer.recover(shards=shards)
    run.train(1)
    run.checkpointer.wait()
    state = run.state()
    assert {record.kind for _, record, _ in shard_records(run.store)} == {"base"}
    assert not path.exists()
    run.die()
    fresh, report = recover(run)
    assert report.damaged_segments == []
    assert_same(fresh.state(), state)
    fresh.checkpointer.close()


def test_a_damaged_dense_part_falls_back_to_the_last_full_recovery_point(tmp_path):
    run = Trained(tmp_path, TABLES, lookups=12, **{**OPTIONS, "priority": None})
    run.train(1)
    at_one = run.state()
    run.train(2)
    run.checkpointer.wait()
    assert [record.is_complete for record in run.store.dense.segments] == [True, False]
    record = run.store.dense.segments[-1]
    path = run.store.dense.path_of(record)
    run.die()
    flip(path, record.header_bytes + 1)
    fresh, report = recover(run)
    assert [damaged.path for damaged in report.damaged_segments] == [path]
    assert report.step == 1
    assert_same(fresh.state(), at_one)
    fresh.checkpointer.close()


def test_without_any_good_dense_part_recovery_says_which_is_damaged_and_changes_nothing(trained):
    run, _ = trained
    for record in run.store.dense.segments:
        flip(run.store.dense.path_of(record), record.header_bytes + 1)
    files = {path: path.read_bytes() for path in run.store.directory.rglob("*.safetensors")}
    fresh = Trained(run.store.directory, TABLES, seed=9, **OPTIONS)
    before = fresh.state()
    for mode in ("partial", "full"):
        with pytest.raises(DamageError, match=r"no undamaged dense part is left.*dense\.safe"):
            fresh.checkpointer.recover(mode=mode)
    assert_same(fresh.state(), before)
    fresh.checkpointer.close()
    assert {p: p.read_bytes() for p in run.store.directory.rglob("*.safetensors")} == files


@pytest.mark.parametrize("name", ["STORE.json", "dense/MANIFEST.json", "shard-00001/MANIFEST.json"])
def test_a_damaged_manifest_or_store_file_is_named_and_nothing_is_removed(trained, name):
    run, _ = trained
    path = run.store.directory / name
    files = sorted(run.store.directory.rglob("*.safetensors"))
    for position in range(0, path.stat().st_size, 7):
        with flipped(path, position, bit=position % 8):
            with pytest.raises(DamageError, match=path.name) as damage:
                Trained(run.store.directory, TABLES, **OPTIONS)
            assert str(path) in str(damage.value)
    assert sorted(run.store.directory.rglob("*.safetensors")) == files


def test_bytes_of_a_small_store_are_checked_on_the_way_in(tmp_path):
    """One table of a few rows: any flipped byte of any file is told, or changes nothing."""
    run = Trained(
        tmp_path / "store",
        {"a": (4, 2)},
        lookups=2,
        **{**OPTIONS, "num_shards": 1, "schedule": cpr_ext.EverySteps(100)},
    )
    run.train(1)
    run.checkpointer.wait()
    run.train(1)
    run.checkpointer.save()
    run.checkpointer.wait()
    state = run.state()
    run.die()
    live = Trained(
        tmp_path / "store",
        {"a": (4, 2)},
        **{**OPTIONS, "num_shards": 1, "staging": cpr_ext.StagingOptions(direct_io=False)},
    )
    recovering = live.checkpointer
    assert recovering.recover().damaged_segments == []
    assert_same(live.state(), state)
    # Spaces of the header block and zeros of the pads are bytes like any other.
    num_flipped = 0
    for _, record, path in shard_records(live.store):
        for position in range(record.file_bytes):
            with flipped(path, position, bit=position % 8):
                report = recovering.recover(shards=[0])
            assert [damaged.path for damaged in report.damaged_segments] == [path], position
            num_flipped += 1
    assert num_flipped > 1500
    (record,) = [r for r in live.store.dense.segments if r.snapshot == 2]
    path = live.store.dense.path_of(record)
    for position in range(0, record.file_bytes, 251):
        findings = Findings()
        with flipped(path, position, bit=position % 8), pytest.raises(DamageError):
            newest_undamaged(live.store.dense, [record], findings)
        assert [damaged.path for damaged in findings.damaged_segments] == [path]
    assert recovering.recover().damaged_segments == []
    recovering._release()


def test_rows_lost_to_damage_count_in_report_metrics_and_log(trained, caplog):
    run, _ = trained
    base = next(path for _, record, path in shard_records(run.store) if record.kind == "base")
    flip(base, array_offset(base, "tables.a/weight"))
    fresh, report = recover(run)
    metrics = fresh.checkpointer.metrics
    assert report.rows_missing > 0
    # Each missing row lost all samples: the share that it has of its shard.
    share = report.rows_missing * NUM_SHARDS / TABLES["a"][0]
    older = sum(int(rows.steps_older.sum()) for rows in report.older_rows.values())
    assert older == 0
    assert report.samples_lost == pytest.approx(share * report.num_samples, abs=1)
    assert metrics.samples_lost == report.samples_lost
    assert metrics.portion_of_lost_samples > 0
    assert metrics.rows_damaged == report.rows_damaged == report.rows_missing
    assert report.row_updates_lost is None
    assert metrics.row_updates_lost is None
    assert report.damage in caplog.text
    fresh.checkpointer.close()
