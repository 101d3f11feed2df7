"""When a snapshot is called complete, and what is said of rows that changed unseen."""

import time
import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext import Retention, StoreOptions
from cpr_ext.errors import SnapshotError, StoreError, UntrackedChangeWarning, UsageError
from cpr_ext.saving import background_capture, claims
from cpr_ext.saving.amount import CaptureAmount
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance.inspection import inspect
from python_tests.helpers import die, flip, open_checkpointer
from python_tests.tracking.watched import NEVER, Watched, backward_of

N = 2000


def make(tables=2, kind=torch.optim.Adagrad):
    torch.manual_seed(0)
    model = nn.ModuleDict({f"t{i}": nn.Embedding(N, 8, sparse=True) for i in range(tables)})
    return model, kind(model.parameters(), lr=0.1)


def train(run, *rows):
    run.optimizers[0].zero_grad()
    sum(module(torch.tensor(rows or (3,))).sum() for module in run.model.values()).backward()
    run.optimizers[0].step()
    return run.ckpt.step()


def are_complete_on_disk(run):
    """What another process reads now."""
    return [record.is_complete for record in StoreReader(run.directory).manifest.dense]


def write_past_pytorch(run, table, row):
    run.model[table].weight.data[row, 0] += 1  # shares memory, not the version


def point(run, kind="partial"):
    """A snapshot of now, whose check may not have begun."""
    saved = run.ckpt.save(kind)
    saved.wait_until_done()
    return saved


@pytest.fixture
def run(tmp_path):
    run = Watched(tmp_path / "store", *make(), store=StoreOptions(retention=Retention(9)))
    train(run)
    yield run
    run.ckpt.close()


@pytest.fixture
def slow_checks(monkeypatch):
    """A check takes some steps, one slice in each."""
    monkeypatch.setattr(claims, "_SLICE_BYTES", 50_000)
    monkeypatch.setattr(claims, "_LONGEST_SECONDS", 0.0)


@pytest.mark.usefixtures("slow_checks")
def test_a_point_is_complete_on_disk_once_its_check_has_ended(run):
    saved = point(run)
    assert are_complete_on_disk(run) == [True, False]
    assert not saved.is_complete
    steps = 0
    while not saved.is_complete:
        train(run, steps)
        steps += 1
    assert steps > 2
    run.ckpt._saver.outcomes.flush()
    assert are_complete_on_disk(run) == [True, True]
    assert run.ckpt.metrics.complete_step == saved.step == 2
    assert inspect(run.directory).points[-1].is_full_recovery_point


@pytest.mark.usefixtures("slow_checks")
@pytest.mark.parametrize("call", ["wait", "check", "close"])
def test_a_call_that_waits_makes_the_check_at_once(run, call):
    saved = point(run)
    assert not saved.is_complete
    getattr(run.ckpt, call)()
    assert saved.is_complete
    assert are_complete_on_disk(run) == [True, True]


@pytest.mark.usefixtures("slow_checks")
def test_a_point_that_comes_during_a_check_is_not_checked(run, caplog):
    caplog.set_level("INFO")
    first = point(run)
    train(run, 4)
    second = run.ckpt.save()
    run.ckpt.wait()
    assert (first.is_complete, second.is_complete) == (True, False)
    assert "snapshot 3 is not checked, as the check of snapshot 2 is still made" in caplog.text
    third = run.ckpt.save()
    run.ckpt.wait()
    assert third.is_complete


@pytest.mark.usefixtures("slow_checks")
def test_where_training_waits_for_points_each_is_checked(tmp_path):
    """The workers of a job go back to a point that all have: none may leave other ones out."""
    options = {"schedule": cpr_ext.EverySteps(1, when_busy="wait")}
    keep = Retention(full_recovery_points=9)
    run = Watched(tmp_path / "store", *make(), store=StoreOptions(retention=keep), **options)
    for row in range(5):
        train(run, row)
    run.ckpt.wait()
    assert are_complete_on_disk(run) == [True] * 6
    run.ckpt.close()


@pytest.mark.usefixtures("slow_checks")
@pytest.mark.parametrize("row", [77, N - 1])
def test_a_write_before_a_point_denies_it_and_the_next_holds_it(run, row):
    write_past_pytorch(run, "t1", row)
    false = point(run)

    def train_and_wait():
        train(run, row)  # which makes it dirty: its hash is compared before
        run.ckpt.wait()

    with pytest.warns(UntrackedChangeWarning, match=f"'t1'.*row {row} counts as unchanged"):
        train_and_wait()
    assert run.ckpt.metrics.rows_changed_unseen == 1
    true = run.ckpt.save()
    run.ckpt.wait()
    assert (false.is_complete, true.is_complete) == (False, True)
    run.assert_recovers(make)


def test_rows_are_compared_after_snapshots_that_cannot_be_complete_too(tmp_path):
    run = Watched(tmp_path / "store", *make(), priority=cpr_ext.MostFrequentlyUsed(0.001))
    train(run, *range(20))
    write_past_pytorch(run, "t0", 1999)
    with pytest.warns(UntrackedChangeWarning, match="row 1999"):
        run.save()
    assert run.ckpt.save("base").kind == "base"
    run.ckpt.close()


def test_a_base_that_was_captured_at_once_needs_no_check(run):
    saved = run.ckpt.save("base")
    assert (saved.wait_until_done(60), saved.is_complete) == (True, True)
    write_past_pytorch(run, "t0", 5)
    with pytest.warns(UntrackedChangeWarning, match="row 5"):
        assert run.ckpt.check() == {"t0": 5}
    assert saved.is_complete


def test_check_names_a_row_of_each_table_and_finds_nothing_in_what_training_changes(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in range(12):
            train(run, row)
            assert run.ckpt.check() == {}
            if row % 3 == 0:
                run.save("partial" if row % 2 else "base")
    run.save()
    for table, row in (("t0", 1500), ("t0", 90), ("t1", 1)):
        write_past_pytorch(run, table, row)
    with pytest.warns(UntrackedChangeWarning):
        assert run.ckpt.check() == {"t0": 90, "t1": 1}
    backward_of(run.model["t0"], 3)
    run.optimizers[0].step()
    with pytest.raises(UsageError, match=r"check\(\) in the middle of step"):
        run.ckpt.check()


def test_state_that_the_optimizer_makes_later_is_no_change(tmp_path):
    run = Watched(tmp_path / "store", *make(1, torch.optim.SparseAdam))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for row in range(4):
            train(run, row)
            assert run.ckpt.check() == {}
    run.ckpt.close()


def test_restored_rows_are_known(tmp_path):
    run = Watched(tmp_path / "store", *make(), num_shards=4)
    train(run)
    run.save()
    write_past_pytorch(run, "t1", N // 4)
    write_past_pytorch(run, "t1", N - 1)
    run.ckpt.recover(shards=[3])
    with pytest.warns(UntrackedChangeWarning, match=f"row {N // 4} "):
        assert run.ckpt.check() == {"t1": N // 4}
    die(run.ckpt)
    model, optimizer = make()
    with cpr_ext.Checkpointer(model, optimizer, run.directory, num_shards=4, **NEVER) as ckpt:
        assert ckpt.recover().is_complete
        model["t1"].weight.data[1234, 0] += 1
        with pytest.warns(UntrackedChangeWarning, match="row 1234"):
            assert ckpt.check() == {"t1": 1234}


def test_a_recovery_past_damage_is_not_complete(run):
    run.save()
    (path,) = (run.directory / "segments").glob("*-partial*")
    flip(path, path.stat().st_size - 100)
    die(run.ckpt)
    with open_checkpointer(*make(), run.directory, save_at_close=False, **NEVER) as fresh:
        report = fresh.recover()
    assert report.damaged_segments
    assert not report.is_complete


def test_the_first_snapshot_is_read_back_and_damage_is_said(tmp_path):
    run = Watched(tmp_path / "store", *make())
    outcomes = run.ckpt._saver.outcomes
    (path,) = (run.directory / "segments").glob("00000001-base*")
    outcomes.read_back = None
    flip(path, path.stat().st_size - 100)
    train(run)
    run.save()  # of which the base is a part
    outcomes._committer.call(outcomes.read_back.finish).result()
    with pytest.warns(cpr_ext.errors.SnapshotFailedWarning, match="is damaged"):
        train(run)
    assert run.ckpt.metrics.read_backs_failed == 1
    assert run.save().kind == "dense"
    assert run.ckpt.metrics.base_snapshots == 2
    run.assert_recovers(make)


def with_momentum():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Embedding(N, 8) for name in ("t0", "t1")})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def overlapping(tmp_path, monkeypatch):
    """A run whose capture thread does nothing, so that rows wait for their capture."""
    monkeypatch.setattr(CaptureAmount, "fits", lambda *_, **__: True)
    run = Watched(tmp_path / "store", *with_momentum(), overlap="always")
    train(run, 7, 8)
    set_momentum(run, 0)  # rows 7 and 8 stay where they are
    train(run, 3)
    run.save("base")
    monkeypatch.setattr(background_capture, "capture_until", lambda *_: None)
    yield run
    die(run.ckpt)


def set_momentum(run, value):
    run.optimizers[0].param_groups[0]["momentum"] = value


def begin(run, kind, **options):
    """Begin a snapshot as a schedule does."""
    snapshot = run.ckpt._saver.begin(kind, **options)
    run.ckpt._saver.resume()
    return snapshot


def test_the_check_of_a_snapshot_that_recovery_gives_up_ends(overlapping):
    run = overlapping
    begin(run, "base")
    train(run, 5)
    with pytest.raises(StoreError, match="99"):
        run.ckpt.recover(mode="full", at_step=99)
    train(run, 5)
    run.ckpt.save()
    assert run.ckpt.metrics.rows_changed_unseen == 0


@pytest.mark.parametrize("how", ["in place", "load_state_dict", "base"])
@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
@pytest.mark.usefixtures("slow_checks")
def test_a_check_does_not_pass_by_rows_that_count_as_changed_or_are_saved_meanwhile(run, how):
    write_past_pytorch(run, "t1", N - 2)
    false = point(run)
    if how == "load_state_dict":
        run.optimizers[0].load_state_dict(deepcopy(run.optimizers[0].state_dict()))
    elif how == "base":  # its rows are not those that the check is of
        train(run, 4)
    else:
        with torch.no_grad():
            run.model["t1"].weight[5] += 1
    true = run.ckpt.save("base" if how == "base" else "partial")
    run.ckpt.wait()
    assert (false.is_complete, true.is_complete) == (False, True)


def test_rows_of_a_failed_base_are_not_taken_for_saved(run, monkeypatch):
    write_past_pytorch(run, "t1", 777)
    with monkeypatch.context() as patch:
        patch.setattr(run.ckpt.store, "add", lambda *_: 1 / 0)
        run.ckpt.save("base")
        with pytest.raises(SnapshotError):
            run.ckpt.wait()
    train(run, 5)
    false = run.ckpt.save()
    run.ckpt.wait()
    assert not false.is_complete
    assert run.ckpt.check() == {}  # it cannot compare them
    true = run.ckpt.save("base")
    run.ckpt.wait()
    assert true.is_complete


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_close_saves_what_was_written_unseen_before_the_last_steps(tmp_path):
    run = Watched(tmp_path / "store", *make(), save_at_close=True)
    write_past_pytorch(run, "t1", 777)
    train(run)
    run.ckpt.close()
    assert are_complete_on_disk(run)[-1]
    model, optimizer = make()
    with cpr_ext.Checkpointer(model, optimizer, run.directory, **NEVER) as fresh:
        fresh.recover()
        assert torch.equal(model["t1"].weight, run.model["t1"].weight)


def test_a_base_of_one_step_lacks_rows_that_were_written_in_it_after_their_capture(tmp_path):
    run = Watched(tmp_path / "store", *make(1), overlap="always")
    train(run, 3)
    snapshot = begin(run, "base")
    while snapshot.has_rows_left:  # on the thread that captures
        time.sleep(0.001)
    with run.ckpt.writing_rows("t0", torch.tensor([5])), torch.no_grad():
        run.model["t0"].weight[5] += 1
    run.ckpt.wait()
    assert snapshot.first_step == snapshot.last_step
    assert not snapshot.is_complete
    run.ckpt.close()
