"""Full-recovery points that are read back: only what a recovery restores counts as proven."""

import warnings

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext.errors import SnapshotFailedWarning, StoreError
from cpr_ext.recovery.restore import read_block, read_dense
from cpr_ext.saving import round_trip
from cpr_ext.saving.rebase_policy import RebasePolicy
from cpr_ext.saving.round_trip import RoundTrip, RoundTrips
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance.verification import verify
from python_tests.helpers import die, flip, short_windows
from python_tests.tracking.watched import Watched

N = 3000


class Model(nn.Module):
    def __init__(self, tables=2):
        super().__init__()
        self.tables = nn.ModuleDict(
            {f"t{i}": nn.Embedding(N, 8, sparse=True) for i in range(tables)}
        )
        self.head = nn.Linear(8, 1)

    def forward(self, rows):
        return self.head(sum(table(rows) for table in self.tables.values())).square().mean()


def make(tables=2, kind=torch.optim.Adagrad):
    torch.manual_seed(0)
    model = Model(tables)
    return model, [
        kind(model.tables.parameters(), lr=0.1),
        torch.optim.SGD(model.head.parameters(), lr=0.1),
    ]


def train(run, *rows):
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.model(torch.tensor(rows or (3,))).backward()
    for optimizer in run.optimizers:
        optimizer.step()
    return run.ckpt.step()


def read_back(ckpt):
    """Let what is being read back end, and take note of it."""
    saver = ckpt._saver
    saver._parts.committer.call(saver.claims.round_trips.finish).result()
    saver.settle()


def begun(tmp_path, **options):
    run = Watched(tmp_path / "store", *make(), **options)
    read_back(run.ckpt)
    return run


def save_and_read_back(run):
    run.save()
    read_back(run.ckpt)


def is_complete_on_disk(run):
    return [record.is_complete for record in StoreReader(run.directory).dense.segments]


def settings(kind):
    return {"overlap": "always" if kind == "overlap" else "never", "consistency": "step"}


@pytest.fixture
def run(tmp_path):
    run = begun(tmp_path)
    yield run
    run.ckpt.close()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(round_trip, "_BLOCK_BYTES", 6400)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("kind", ["overlap", "at once"])
@pytest.mark.usefixtures("small_blocks")
def test_a_point_is_read_back_as_captured_and_others_of_its_form_are_not(
    kind, num_shards, tmp_path
):
    run = Watched(tmp_path / "store", *make(), num_shards=num_shards, **settings(kind))
    metrics = run.ckpt.metrics
    read_back(run.ckpt)
    assert (metrics.round_trips, metrics.round_trips_failed) == (1, 0)
    for row in range(3):
        train(run, row, row + 7)
        handle = run.ckpt.save()
        run.ckpt.wait()
        read_back(run.ckpt)
        assert handle._snapshot.is_read_back
        assert not handle.is_proven  # no pass of the scrub began since
    assert run.ckpt.scrub() == {}
    assert handle.is_proven
    assert metrics.round_trips == 1
    run.ckpt.close()


@pytest.mark.usefixtures("small_blocks")
def test_rows_that_were_copied_before_they_changed_are_compared_as_copied(tmp_path):
    model, optimizers = make()
    with short_windows():
        run = Watched(
            tmp_path / "store",
            model,
            optimizers,
            overlap="always",
            consistency="step",
            staging=cpr_ext.StagingOptions(num_threads=1, slot_bytes=56 << 10),
        )
        run.ckpt._saver.begin("base")
        run.ckpt._saver.resume()
        num_steps = 0
        while run.ckpt._saver.in_flight.has_rows_left:
            train(run, *range(N - 1 - num_steps, 0, -40))
            num_steps += 1
        run.ckpt.wait()
    assert num_steps > 1  # training changed rows that waited for their capture
    read_back(run.ckpt)
    assert run.newest().is_complete
    assert run.ckpt.metrics.round_trips_failed == 0
    assert run.ckpt.metrics.round_trips >= 1
    run.ckpt.close()


def test_a_row_that_a_recovery_would_restore_wrongly_is_named_and_revoked(tmp_path, monkeypatch):
    def wrong(shard, table, begin, end, slots, **options):
        arrays = read_block(shard, table, begin, end, slots, **options)
        if table == "tables.t1" and begin <= 77 < end:
            arrays["sum"][77 - begin, 2] += 1
        return arrays

    monkeypatch.setattr(round_trip, "read_block", wrong)
    text = r"\[1\].*row 77 of table 'tables.t1' is another one in its file \(arrays: sum\)"
    with pytest.warns(SnapshotFailedWarning, match=text):
        run = begun(tmp_path)
    assert is_complete_on_disk(run) == [False]
    monkeypatch.setattr(round_trip, "read_block", read_block)
    train(run)
    assert run.save().is_complete
    assert run.ckpt.store.shards[0].segments[-1].kind == "base"  # nothing of before is trusted
    read_back(run.ckpt)
    assert (run.ckpt.metrics.round_trips, run.ckpt.metrics.round_trips_failed) == (1, 1)
    run.assert_recovers(make)


def test_a_dense_part_that_a_recovery_would_restore_wrongly_is_named(tmp_path, monkeypatch):
    def wrong(*arguments, **options):
        part = read_dense(*arguments, **options)
        part.tensors["dense.model.head.bias"] += 1
        return part

    monkeypatch.setattr(round_trip, "read_dense", wrong)
    with pytest.warns(SnapshotFailedWarning, match="tensor 'dense.model.head.bias' of the dense"):
        run = begun(tmp_path)
    assert is_complete_on_disk(run) == [False]
    monkeypatch.undo()
    run.ckpt.close()


def test_a_file_that_was_damaged_after_it_was_committed_is_named(tmp_path, monkeypatch):
    note = RoundTrips.note_committed

    def damage_first(trips, snapshot, dense):
        (path,) = (tmp_path / "store" / "shard-00000").glob("*.safetensors")
        flip(path, path.stat().st_size // 2)
        note(trips, snapshot, dense)

    monkeypatch.setattr(RoundTrips, "note_committed", damage_first)
    with pytest.warns(SnapshotFailedWarning, match="shard-00000"):
        run = begun(tmp_path)
    assert is_complete_on_disk(run) == [False]
    monkeypatch.undo()
    die(run.ckpt)


def test_damage_of_history_is_not_held_against_the_base_that_follows(tmp_path, caplog):
    """Else every later snapshot would be a base, and none complete, as long as the file stays."""
    run = begun(
        tmp_path,
        priority=cpr_ext.AllRows(),
        consistency="step",
        retention=cpr_ext.Retention(full_recovery_points=50),
    )
    train(run, 5)
    run.ckpt.save("partial")
    run.ckpt.wait()
    (path,) = (tmp_path / "store" / "shard-00000").glob("*-partial.safetensors")
    flip(path, path.stat().st_size // 2)
    saver = run.ckpt._saver
    saver._parts.committer.call(saver.claims.round_trips.drop).result()
    train(run, 6)
    damaged = run.ckpt.save("partial")
    damaged.wait_until_done()
    with pytest.warns(SnapshotFailedWarning, match="shard-00000"):
        read_back(run.ckpt)
    assert not damaged.is_complete
    assert "rows had changed" not in caplog.text  # none has
    train(run, 7)
    base = run.ckpt.save("partial")
    run.ckpt.wait()
    read_back(run.ckpt)
    assert (base.kind, base.is_complete) == ("base", True)
    assert path.exists()
    train(run, 8)
    after = run.ckpt.save("partial")
    run.ckpt.wait()
    read_back(run.ckpt)
    assert (after.kind, after.is_complete) == ("partial", True)
    run.ckpt.close()


class WideState(torch.optim.Optimizer):
    """Makes a state of many times the weight at its second step."""

    updates_only_looked_up_rows = True

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "steps" in state:
                state.setdefault("wide", torch.zeros(N, 8 * 40))
            state["steps"] = 1
            rows = parameter.grad.coalesce()
            parameter[rows.indices()[0]] -= 0.1 * rows.values()


def test_a_point_that_recover_refuses_is_found_and_verify_refuses_it_too(tmp_path, monkeypatch):
    # Without the rule that a new state needs a base, as before it was there.
    monkeypatch.setattr(RebasePolicy, "array_names", lambda rule: {})
    run = Watched(tmp_path / "store", *make(1, WideState))
    read_back(run.ckpt)
    for row in range(3):
        train(run, row)
    with pytest.warns(SnapshotFailedWarning, match="no base segment holds it for all rows"):
        save_and_read_back(run)
    assert not is_complete_on_disk(run)[-1]
    die(run.ckpt)
    report = verify(run.directory)
    assert ["no base segment holds it" in each.reason for each in report.damaged] == [True]
    model, optimizers = make(1, WideState)
    run.ckpt._watch.detach()
    with cpr_ext.Checkpointer(model, optimizers, run.directory) as fresh:
        with pytest.raises(StoreError, match="no base segment holds it"):
            fresh.recover()
        fresh._saving._save_at_close = False


def test_a_new_form_of_rows_or_of_the_dense_part_is_read_back_again(run):
    metrics = run.ckpt.metrics
    train(run)
    save_and_read_back(run)
    assert metrics.round_trips == 1
    run.optimizers[1].param_groups[0]["nesterov_of_mine"] = 0.5  # a value of the dense part
    train(run)
    save_and_read_back(run)
    assert metrics.round_trips == 2
    for parameter in run.model.tables.parameters():
        run.optimizers[0].state[parameter]["more"] = torch.ones(N, 3)
    train(run)
    assert run.save().is_complete
    read_back(run.ckpt)
    assert (metrics.round_trips, metrics.round_trips_failed) == (3, 0)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), OSError])
def test_what_cannot_be_compared_is_not_proven_and_no_fault(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(round_trip, "read_block", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Watched(tmp_path / "store", *make())
        read_back(run.ckpt)
        train(run)
        handle = run.ckpt.save()
        run.ckpt.wait()
        run.ckpt.scrub()
    assert handle.is_complete
    assert not handle.is_proven
    monkeypatch.undo()
    train(run)
    later = run.ckpt.save()
    run.ckpt.wait()
    run.ckpt.scrub()
    assert later.is_proven
    run.ckpt.close()


@pytest.mark.parametrize("pieces", [0, 1, 3])
@pytest.mark.usefixtures("small_blocks")
def test_a_point_whose_files_a_newer_one_replaced_is_not_compared(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(RoundTrip, "advance", lambda trip: None)  # only by hand
    run = Watched(tmp_path / "store", *make())
    trips = run.ckpt._saver.claims.round_trips
    monkeypatch.undo()
    monkeypatch.setattr(round_trip, "_BLOCK_BYTES", 6400)
    for _ in range(pieces):
        run.ckpt._saver._parts.committer.call(trips._trip.advance).result()
    monkeypatch.setattr(RoundTrips, "note_committed", lambda *_: None)
    train(run)
    run.save("base")
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_back(run.ckpt)
        assert run.ckpt.metrics.round_trips == 0
        train(run)
        save_and_read_back(run)
    assert run.ckpt.metrics.round_trips == 1
    run.ckpt.close()


def test_points_of_its_form_wait_for_the_one_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(RoundTrip, "advance", lambda trip: None)
    run = Watched(tmp_path / "store", *make())
    trip = run.ckpt._saver.claims.round_trips._trip
    monkeypatch.undo()
    run.ckpt._saver._parts.committer.call(trip.advance).result()
    train(run)
    handle = run.ckpt.save()
    run.ckpt.wait()
    assert run.ckpt._saver.claims.round_trips._trip is trip
    assert not handle._snapshot.is_read_back
    read_back(run.ckpt)
    assert handle._snapshot.is_read_back
    assert run.ckpt.metrics.round_trips == 1
    run.ckpt.close()


ROUNDED = cpr_ext.Precision(base="float16", partial="int8", state="bfloat16")


@pytest.mark.parametrize("kind", ["overlap", "at once"])
@pytest.mark.usefixtures("small_blocks")
def test_rounded_rows_are_compared_as_a_recovery_restores_them(tmp_path, kind):
    with short_windows():
        run = Watched(tmp_path / "store", *make(), precision=ROUNDED, **settings(kind))
        read_back(run.ckpt)
        assert run.ckpt.metrics.round_trips == 1
        with torch.no_grad():  # it breaks every bound, so it is kept exactly
            run.model.tables["t0"].weight[17, 3] = 1e38
        train(run, *range(0, N, 7))
        partial = run.ckpt.save()
        run.ckpt.wait()
    assert run.ckpt.scrub() == {}
    assert (partial.is_proven, run.ckpt.metrics.round_trips) == (True, 2)  # of partial ones, too
    die(run.ckpt)
    run.ckpt._watch.detach()
    model, optimizers = make()
    with cpr_ext.Checkpointer(model, optimizers, run.directory, precision=ROUNDED) as ckpt:
        report = ckpt.recover()
        assert report.is_proven
        assert report.rows_rounded > 0
        model(torch.tensor([4])).backward()
        for optimizer in optimizers:
            optimizer.step()
        ckpt.step()
        again = ckpt.save()
        ckpt.wait()
        assert ckpt.scrub() == {}
        assert again.is_proven  # rows that were not saved since are the restored ones


def test_rounded_rows_of_shards_that_were_not_lost_are_compared_with_what_files_restore(tmp_path):
    run = Watched(tmp_path / "store", *make(), precision=ROUNDED, num_shards=3)
    train(run, *range(0, N, 7))
    run.save()  # in memory these rows are still exact
    run.ckpt.recover(shards=[2])
    train(run, 3)
    partial = run.ckpt.save()
    run.ckpt.wait()
    assert run.ckpt.scrub() == {}
    assert partial.is_proven
    run.ckpt.close()


def test_a_rounded_row_that_a_recovery_would_restore_otherwise_is_named(tmp_path, monkeypatch):
    run = Watched(tmp_path / "store", *make(), precision=ROUNDED)
    read_back(run.ckpt)
    train(run, 3)
    monkeypatch.setattr(round_trip, "read_block", change_a_row(5, by=2e-3))
    run.ckpt.save()
    run.ckpt.wait()
    with pytest.warns(SnapshotFailedWarning, match="row 5 of table 'tables.t0' is another one"):
        read_back(run.ckpt)
    assert not is_complete_on_disk(run)[-1]
    run.ckpt.close()


def change_a_row(row_id, by):
    def read(shard, table, begin, end, *args, **options):
        arrays = read_block(shard, table, begin, end, *args, **options)
        if begin <= row_id < end:
            arrays["weight"][row_id - begin, 0] += by
        return arrays

    return read


def test_a_recovery_begins_the_proofs_again(run):
    train(run)
    run.save()
    run.ckpt.recover()
    assert run.ckpt._saver.claims.round_trips._compared is None
    train(run)
    handle = run.ckpt.save()
    run.ckpt.wait()
    assert run.ckpt.scrub() == {}
    assert handle.is_proven
    assert run.ckpt.metrics.round_trips == 2
