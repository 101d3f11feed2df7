"""Partial recovery touches only what was lost; full recovery goes back to a single step."""

import builtins
import io
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import cpr_ext
from cpr_ext._native import native
from cpr_ext.errors import SnapshotError, StoreError, UsageError
from cpr_ext.state.table import shard_row_range
from cpr_ext.storage.manifest import Manifest
from python_tests.helpers import (
    TABLE_OPTIMIZERS,
    Trained,
    assert_same,
    build,
    copy_rows,
    copy_state,
    differences,
    make_indices,
    same_bits,
    shard_records,
    train_step,
)

NUM_SHARDS = 4
OPTIONS = {
    "num_shards": NUM_SHARDS,
    "consistency": "step",
    "when_busy": "wait",
    "schedule": cpr_ext.EverySteps(3),
}


def shard_range(table, shard):
    return slice(*shard_row_range(table.num_embeddings, shard, NUM_SHARDS))


def wipe(run, shards):
    """What losing a shard's memory does."""
    with torch.no_grad():
        for table in run.checkpointer.tables:
            for shard in shards:
                for array in table.arrays().values():
                    array[shard_range(table, shard)] = 7


def make_garbage_of_all_but(directory: Path, shard: int) -> int:
    """Ruin every data file outside one shard's directory; returns how many."""
    ruined = 0
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "LOCK" and path.parent.name != f"shard-{shard:05d}":
            path.write_bytes(b"garbage")
            ruined += 1
    return ruined


@pytest.mark.parametrize("optimizer", sorted(TABLE_OPTIMIZERS))
@pytest.mark.parametrize("lost", [[0], [3], [1, 2]])
def test_partial_recovery_leaves_everything_but_the_lost_rows_bit_identical(
    tmp_path, optimizer, lost
):
    run = Trained(tmp_path, optimizer=optimizer, **OPTIONS)
    run.train(8)
    run.checkpointer.wait()
    before, position = run.state(), (run.checkpointer.step_count, run.checkpointer.num_samples)
    rows_before = run.rows()
    wipe(run, lost)
    report = run.checkpointer.recover(shards=lost)
    assert report.shards == tuple(lost)
    assert (report.step, report.num_samples) == position
    assert position == (run.checkpointer.step_count, run.checkpointer.num_samples)
    for table in run.checkpointer.tables:
        for name, now in table.arrays().items():
            for shard in range(NUM_SHARDS):
                rows = shard_range(table, shard)
                same = same_bits(now[rows], rows_before[table.name][name][rows])
                if shard not in lost:
                    assert same, (table.name, name, shard)
                assert not (now[rows] == 7).all() or now[rows].numel() == 0
    # Put the lost rows back by hand: nothing else may differ.
    for table in run.checkpointer.tables:
        for name, now in table.arrays().items():
            for shard in lost:
                rows = shard_range(table, shard)
                with torch.no_grad():
                    now[rows] = rows_before[table.name][name][rows]
    assert_same(run.state(), before)
    run.checkpointer.close()


@pytest.mark.parametrize("lost", range(NUM_SHARDS))
def test_partial_recovery_needs_no_file_of_another_shard_nor_of_the_dense_part(tmp_path, lost):
    run = Trained(tmp_path, **OPTIONS)
    run.train(8)
    run.checkpointer.save("base")
    run.checkpointer.wait()
    before = run.state()
    wipe(run, [lost])
    assert differences(run.state(), before)
    assert make_garbage_of_all_but(tmp_path, lost) == 2 * NUM_SHARDS + 2
    report = run.checkpointer.recover(shards=[lost])
    assert (report.damaged_segments, report.rows_stale, report.samples_lost) == ([], 0, 0)
    assert report.segments_read == 1
    assert_same(run.state(), before)
    run.checkpointer._release()


def test_partial_recovery_opens_only_the_segments_of_the_lost_shard(tmp_path, monkeypatch):
    run = Trained(tmp_path, **OPTIONS)
    run.train(8)
    run.checkpointer.wait()
    opened = []
    restore, path_open, file_open = native.restore_segments, Path.open, builtins.open

    def note_open(file, *args, **kwargs):
        opened.append(Path(str(file)))
        return file_open(file, *args, **kwargs)

    def note_path_open(self, *args, **kwargs):
        opened.append(self)
        return path_open(self, *args, **kwargs)

    def note_restore(sources, **kwargs):
        opened.extend(Path(source.path) for source in sources)
        return restore(sources, **kwargs)

    monkeypatch.setattr(native, "restore_segments", note_restore)
    monkeypatch.setattr(Path, "open", note_path_open)
    monkeypatch.setattr(builtins, "open", note_open)
    monkeypatch.setattr(io, "open", note_open)
    report = run.checkpointer.recover(shards=[2])
    monkeypatch.undo()
    live = [path for shard, _, path in shard_records(run.store) if shard == 2]
    assert {path for path in opened if tmp_path in path.parents} == set(live)
    assert report.segments_read == len(live) > 1
    run.checkpointer.close()


def test_accounting_counts_dirty_rows_and_samples_of_each_lost_shard_once(tmp_path):
    run = Trained(tmp_path, {"a": (40, 2)}, lookups=3, **OPTIONS)
    run.checkpointer.schedule = cpr_ext.EverySteps(1000)
    run.train(1)  # the base snapshot
    run.checkpointer.wait()
    saved = run.rows()["tables.a"]["weight"]
    run.train(4, num_samples=16)
    changed = (run.rows()["tables.a"]["weight"] != saved).any(dim=1)
    wipe(run, [0, 1])
    report = run.checkpointer.recover(shards=[1, 0, 1])
    assert report.shards == (0, 1)
    assert report.rows_restored == 20
    assert report.rows_stale == int(changed[:20].sum()) > 0
    assert report.samples_lost == 2 * 4 * 16
    again = run.checkpointer.recover(shards=[0])
    assert (again.rows_stale, again.samples_lost) == (0, 0)
    run.train(1, num_samples=16)
    third = run.checkpointer.recover(shards=[0, 2])
    assert third.samples_lost == 16 + 5 * 16
    assert run.checkpointer.metrics.samples_lost == 2 * 4 * 16 + 16 + 5 * 16
    run.checkpointer.close()


def test_lost_rows_come_back_in_their_newest_saved_state(tmp_path):
    run = Trained(tmp_path, {"a": (40, 2)}, lookups=30, **OPTIONS, priority=cpr_ext.AllRows())
    run.train(4)
    run.checkpointer.wait()
    saved = run.rows()
    run.train(1)
    assert differences(run.rows(), saved)
    everything = list(range(NUM_SHARDS))
    wipe(run, everything)
    run.checkpointer.recover(shards=everything)
    assert_same(run.rows(), saved)
    run.checkpointer.close()


def test_a_snapshot_still_capturing_when_a_shard_is_lost_is_given_up_and_its_rows_stay_dirty(
    tmp_path,
):
    run = Trained(
        tmp_path,
        {"a": (3000, 8)},
        num_shards=NUM_SHARDS,
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
        schedule=cpr_ext.EverySteps(1000),
    )
    run.train(1)
    run.checkpointer.wait()
    run.train(1)
    snapshot = run.checkpointer._saver.begin("base")
    run.train(1)
    assert (snapshot.state, snapshot.first_step) == ("capturing", 3)
    tracker = run.checkpointer._trackers["tables.a"]
    lookups = set()
    for step in (1, 2):
        generator = torch.Generator().manual_seed(1000 + step)
        lookups |= set(make_indices(run.model, generator, run.lookups)["a"].tolist())
    run.checkpointer.recover(shards=[3])
    begin, end = shard_row_range(3000, 3, NUM_SHARDS)
    kept = {row_id for row_id in lookups if not begin <= row_id < end}
    assert set(tracker.dirty_rows(0, 3000).tolist()) == kept
    run.train(20)
    run.checkpointer.wait()
    assert run.checkpointer.metrics.failed_snapshots == 0
    run.checkpointer.close()


def test_a_base_given_up_for_a_recovery_is_taken_again_if_the_state_arrays_had_changed(tmp_path):
    """Partial snapshots over a base without their state arrays would leave most rows without."""
    tables = {"a": (3000, 8)}
    run = Trained(
        tmp_path,
        tables,
        optimizer="adam",
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
        num_shards=2,
        schedule=cpr_ext.EverySteps(1),
    )
    run.checkpointer.save("base")  # before Adam has any state
    run.checkpointer.wait()
    run.train(1)
    assert run.checkpointer._saver.in_flight.kind == "base"
    run.checkpointer.recover(shards=[0])
    run.train(30)
    run.checkpointer.wait()
    run.die()
    fresh = Trained(tmp_path, tables, optimizer="adam", seed=1, num_shards=2)
    fresh.checkpointer.recover()
    for shard in fresh.store.shards:
        newest = [record for record in shard.segments if record.kind == "base"][-1]
        assert newest.snapshot > 1
    fresh.train(1)
    fresh.checkpointer.close()


def test_optimizer_state_that_appears_during_a_capture_does_not_break_the_recovered_optimizer(
    tmp_path,
):
    """A table looked up for the first time while a base is on its way gets its state then."""

    def make(seed):
        model, _ = build({"a": (6000, 8), "b": (500, 8)}, "sparse_adam", seed=seed)
        return model, [torch.optim.SparseAdam(model.tables.parameters())]

    def train(model, optimizers, checkpointer, names):
        generator = torch.Generator().manual_seed(checkpointer.step_count)
        indices = make_indices(model, generator, 20)
        train_step(model, optimizers, {name: indices[name] for name in names}, generator)
        checkpointer.step()

    model, optimizers = make(0)
    options = {
        "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10),
        "num_shards": 3,
        "schedule": cpr_ext.EverySteps(1000),
    }
    checkpointer = cpr_ext.Checkpointer(model, optimizers, tmp_path, **options)
    train(model, optimizers, checkpointer, ["a"])
    assert checkpointer._saver.in_flight.state == "capturing"
    while checkpointer.metrics.base_snapshots == 0:
        train(model, optimizers, checkpointer, ["a", "b"])
        assert checkpointer.step_count < 500
    checkpointer.wait()
    rows = copy_rows(checkpointer.tables)
    checkpointer._recorder.detach()
    checkpointer.store.close()
    fresh, fresh_optimizers = make(1)
    again = cpr_ext.Checkpointer(fresh, fresh_optimizers, tmp_path, **options)
    again.recover()
    assert {name: sorted(arrays) for name, arrays in copy_rows(again.tables).items()} == {
        name: sorted(arrays) for name, arrays in rows.items()
    }
    train(fresh, fresh_optimizers, again, ["a", "b"])
    again.close()


# --- full recovery ---


@pytest.mark.parametrize("optimizer", sorted(TABLE_OPTIMIZERS))
def test_full_recovery_goes_back_to_one_step_and_training_from_there_equals_an_uninterrupted_run(
    tmp_path, optimizer
):
    options = {**OPTIONS, "priority": cpr_ext.AllRows(), "optimizer": optimizer, "lookups": 30}
    straight = Trained(tmp_path / "straight", **options)
    straight.train(6)
    at_six = straight.state()
    straight.train(6)

    run = Trained(tmp_path / "run", **options)
    run.train(6)
    assert_same(run.state(), at_six)
    run.train(2)  # snapshots at steps 1, 4 and 7
    wipe(run, [1, 3])
    report = run.checkpointer.recover(mode="full")
    assert (report.step, report.num_samples) == (7, 70)
    assert (run.checkpointer.step_count, run.checkpointer.num_samples) == (7, 70)
    run.train(12 - report.step)
    assert_same(run.state(), straight.state())
    run.checkpointer.close()
    straight.checkpointer.close()


def test_full_recovery_restores_the_state_of_its_step_in_a_fresh_process_too(tmp_path):
    options = {**OPTIONS, "priority": cpr_ext.AllRows()}
    run = Trained(tmp_path, **options)
    states = {}
    for _ in range(9):
        run.train(1)
        states[run.checkpointer.step_count] = run.state()
    run.die()
    fresh = Trained(tmp_path, seed=3, **options)
    report = fresh.checkpointer.recover(mode="full")
    assert_same(fresh.state(), states[report.step])
    fresh.checkpointer.close()


def test_full_recovery_rolls_the_store_back_and_abandoned_segments_never_come_back(tmp_path):
    options = {**OPTIONS, "priority": cpr_ext.MostFrequentlyUsed(0.05)}
    run = Trained(tmp_path, {"a": (100, 4)}, lookups=50, **options)
    run.train(1)
    at_one = run.state()
    run.train(11)
    run.checkpointer.wait()
    numbers = {record.snapshot for _, record, _ in shard_records(run.store)}
    assert numbers == {1, 2, 3, 4}
    points = [record.snapshot for record in run.store.dense.segments if record.is_complete]
    assert points == [1]
    report = run.checkpointer.recover(mode="full")
    assert report.step == 1
    assert_same(run.state(), at_one)
    assert {record.snapshot for _, record, _ in shard_records(run.store)} == {1}
    assert {path.name for path in tmp_path.rglob("*.safetensors")} == {
        "00000001-base.safetensors",
        "00000001-dense.safetensors",
    }
    run.die()
    fresh = Trained(tmp_path, {"a": (100, 4)}, seed=3, lookups=50, **options)
    assert fresh.checkpointer.recover().step == 1
    assert_same(fresh.state(), at_one)
    fresh.train(3)
    fresh.checkpointer.wait()
    assert max(record.snapshot for _, record, _ in shard_records(fresh.store)) >= 2
    fresh.checkpointer.close()


def test_full_recovery_without_a_full_recovery_point_says_so_and_changes_nothing(tmp_path):
    run = Trained(
        tmp_path,
        {"a": (3000, 8)},
        num_shards=NUM_SHARDS,
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
        schedule=cpr_ext.EverySteps(100),
    )
    run.train(30)  # a base captured over several steps
    run.checkpointer.wait()
    before, segments = run.state(), [record for _, record, _ in shard_records(run.store)]
    assert not run.store.dense.segments[-1].is_complete
    with pytest.raises(StoreError, match=r"no full-recovery point.*AllRows"):
        run.checkpointer.recover(mode="full")
    assert_same(run.state(), before)
    assert [record for _, record, _ in shard_records(run.store)] == segments
    run.train(1)
    run.checkpointer.close()


def test_rows_that_a_sampler_passed_over_keep_a_snapshot_from_being_a_full_recovery_point(tmp_path):
    run = Trained(
        tmp_path,
        {"a": (100, 4)},
        lookups=5,
        **OPTIONS,
        priority=cpr_ext.SubSampledUsed(fraction=0.5, period=1000),
    )
    run.train(4)
    run.checkpointer.wait()
    assert run.store.dense.segments[-1].last_step == 4
    assert [record.is_complete for record in run.store.dense.segments] == [True, False]
    run.checkpointer.close()


def test_rows_that_momentum_moves_keep_a_snapshot_from_being_a_full_recovery_point(tmp_path):
    run = Trained(tmp_path, {"a": (100, 4)}, optimizer="sgd_momentum", **OPTIONS)
    run.train(1)
    with run.checkpointer.tracking_paused():
        run.train(3)
    run.checkpointer.wait()
    assert run.store.dense.segments[-1].last_step == 4
    assert [record.is_complete for record in run.store.dense.segments] == [True, False]
    run.checkpointer.close()


def test_full_recovery_in_a_live_model_with_nothing_saved_yet_says_so(tmp_path):
    run = Trained(
        tmp_path,
        {"a": (3000, 8)},
        num_shards=8,
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
    )
    run.train(1)
    assert run.store.is_empty
    for mode in ("full", "partial"):
        with pytest.raises(StoreError, match="nothing"):
            run.checkpointer.recover(mode=mode)
    run.train(1)
    run.checkpointer.close()


def test_going_back_drops_per_row_state_that_the_optimizer_has_made_since(tmp_path):
    run = Trained(tmp_path, optimizer="adam", **OPTIONS)
    before = run.state()
    run.checkpointer.save("base")
    run.checkpointer.wait()
    with run.checkpointer.tracking_paused():
        generator = torch.Generator().manual_seed(0)
        train_step(run.model, run.optimizers, make_indices(run.model, generator, 5), generator)
    run.checkpointer.recover(mode="full")
    assert_same(run.state(), before)
    run.train(4)
    run.checkpointer.close()


# --- after a process death ---


def test_a_restart_continues_from_the_newest_committed_snapshot(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(5)
    run.checkpointer.wait()
    newest = run.store.dense.segments[-1].last_step
    run.die()
    fresh = Trained(tmp_path, seed=9, **OPTIONS)
    report = fresh.checkpointer.recover()
    assert report.step == newest == 4
    assert fresh.checkpointer.step_count == 4
    fresh.train(3)
    fresh.checkpointer.close()
    last = Trained(tmp_path, seed=10, **OPTIONS)
    assert last.checkpointer.recover().step == 7
    last.checkpointer.close()


def test_lookups_of_a_step_that_training_goes_back_behind_make_no_row_dirty(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.record_lookups("tables.big", torch.tensor([7, 8]))
    run.checkpointer.recover()
    run.checkpointer._recorder.flush()
    assert run.checkpointer._trackers["tables.big"].num_dirty(0, 200) == 0
    run.checkpointer.close()


def test_extra_state_comes_back_as_it_was_at_the_snapshot(tmp_path):
    position = {"epoch": 0, "tensor": torch.arange(3), "names": ("a", None)}
    run = Trained(tmp_path, extra_state=lambda: dict(position), **OPTIONS)
    run.train(1)
    run.checkpointer.wait()
    position["epoch"] = 1
    run.die()
    fresh = Trained(tmp_path, **OPTIONS)
    extra = fresh.checkpointer.recover().extra_state
    assert_same(extra, {"epoch": 0, "tensor": torch.arange(3), "names": ("a", None)})
    fresh.checkpointer.close()


def test_an_empty_store_reports_step_zero_and_leaves_the_model_as_it_is(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    before = run.state()
    report = run.checkpointer.recover()
    assert (report.step, report.num_samples, report.rows_restored) == (0, 0, 0)
    assert report.extra_state is None
    assert_same(run.state(), before)
    run.checkpointer.close()


def test_segments_of_a_snapshot_that_never_committed_as_a_whole_are_rolled_back(
    tmp_path, monkeypatch
):
    options = {**OPTIONS, "priority": cpr_ext.AllRows()}
    run = Trained(tmp_path, lookups=30, **options)
    run.train(1)
    run.checkpointer.wait()
    at_one = run.state()
    commit = Manifest.commit

    def fail_for_dense(self, segments, seen=None):
        if self.directory.name == "dense":
            raise OSError("the process died here")
        commit(self, segments, seen)

    monkeypatch.setattr(Manifest, "commit", fail_for_dense)
    run.train(3)
    with pytest.raises(SnapshotError):
        run.checkpointer.wait()
    monkeypatch.undo()
    assert {record.snapshot for _, record, _ in shard_records(run.store)} == {1, 2}
    run.die()
    fresh = Trained(tmp_path, seed=4, **options)
    assert fresh.checkpointer.recover().step == 1
    assert_same(fresh.state(), at_one)
    assert {record.snapshot for _, record, _ in shard_records(fresh.store)} == {1}
    fresh.checkpointer.close()


@pytest.mark.parametrize("num_commits", range(6))
def test_a_crash_at_any_commit_of_a_new_base_leaves_a_full_recovery_point_with_its_rows(
    tmp_path, monkeypatch, num_commits
):
    """The old point must not outlive the rows it names."""
    tables = {"a": (3000, 8)}
    options = {
        "num_shards": 2,
        "staging": cpr_ext.StagingOptions(slot_bytes=64 << 10),
        "schedule": cpr_ext.EverySteps(1000),
    }
    run = Trained(tmp_path, tables, **options)
    run.train(1)
    run.checkpointer.save("base")  # at one step
    run.checkpointer.wait()
    at_point = run.state()
    step = run.checkpointer.step_count
    commit, left = Manifest.commit, [num_commits]

    def die_after_some(self, segments, seen=None):
        if left[0] == 0:
            raise KeyboardInterrupt("the process died here")
        left[0] -= 1
        commit(self, segments, seen)

    run.train(5)
    snapshot = run.checkpointer._saver.begin("base")
    run.train(2)
    assert snapshot.state == "capturing"
    monkeypatch.setattr(Manifest, "commit", die_after_some)
    monkeypatch.setattr(run.checkpointer._saver._committer, "submit", lambda commit: None)
    while snapshot.state == "capturing":
        run.train(1)
    with suppress(KeyboardInterrupt):
        snapshot.commit()
    monkeypatch.undo()
    run.checkpointer._saver.in_flight = None  # no one is left to finish it
    run.die()
    fresh = Trained(tmp_path, tables, seed=5, **options)
    points = [record for record in fresh.store.dense.segments if record.is_complete]
    if points:
        assert fresh.checkpointer.recover(mode="full").step == step
        assert_same(fresh.state(), at_point)
    else:
        assert num_commits > 2
        report = fresh.checkpointer.recover()
        assert report.rows_restored == 3000
    fresh.checkpointer.close()


def test_step_refuses_to_train_over_snapshots_that_were_not_recovered(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.close()
    fresh = Trained(tmp_path, **OPTIONS)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for call in (fresh.checkpointer.step, fresh.checkpointer.save):
        with pytest.raises(UsageError, match=r"snapshot of step 1; call recover\(\)"):
            call()
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    fresh.checkpointer.recover()
    fresh.train(1)
    fresh.checkpointer.close()


@pytest.mark.parametrize("shards", [[99], [-1], [0, NUM_SHARDS]])
def test_a_shard_that_does_not_exist_is_named(tmp_path, shards):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    before = run.state()
    bad = next(shard for shard in shards if not 0 <= shard < NUM_SHARDS)
    with pytest.raises(UsageError, match=f"shard {bad} does not exist; there are 0 to 3"):
        run.checkpointer.recover(shards=shards)
    with pytest.raises(UsageError, match="full recovery goes back with all shards"):
        run.checkpointer.recover(shards=[0], mode="full")
    assert_same(run.state(), before)
    run.checkpointer.close()


def test_copy_state_sees_every_part_of_the_state(tmp_path):
    """The comparisons above rest on it."""
    run = Trained(tmp_path, optimizer="adam")
    run.train(1)
    before = run.state()
    torch.rand(1)
    assert differences(copy_state(run.model, run.optimizers), before) == ["/torch"]
    before = run.state()
    run.optimizers[0].state[run.model.tables["big"].weight]["exp_avg"][3, 1] += 1
    assert differences(run.state(), before) == ["/optimizers/0/state/0/exp_avg"]
    run.checkpointer.close()
