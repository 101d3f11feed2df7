"""A failed save never kills training, and is never silent."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

import cpr_ext
from cpr_ext.errors import (
    NanError,
    SnapshotError,
    SnapshotFailedWarning,
    StoreError,
    UntrackedChangeWarning,
    UsageError,
)
from cpr_ext.storage.store import Store
from python_tests.helpers import Trained, assert_same, row_records

NEVER = cpr_ext.EverySteps(1000)
OPTIONS = {"num_shards": 2, "schedule": NEVER, "store": cpr_ext.StoreOptions(None)}


def tracker_state(checkpointer):
    """Rows with their priority, of every tracker."""
    states = {}
    for table in checkpointer.tables:
        tracker = checkpointer._trackers[table.name]
        rows = tracker.dirty_rows(0, table.num_embeddings).tolist()
        counts = getattr(tracker, "counts", None)
        counts = counts() if callable(counts) else counts
        states[table.name] = (rows, None if counts is None else counts.tolist())
    return states


@contextmanager
def segments_become_a_file(run):
    segments, hidden = run.store.segments, run.store.directory / "hidden"
    segments.rename(hidden)
    segments.write_text("not a directory")
    yield
    segments.unlink()
    hidden.rename(segments)


def nan_in(array_of, *place):
    @contextmanager
    def broken(run):
        array = array_of(run.model).data
        good, array[place] = array[place].item(), float("nan")
        yield
        array[place] = good

    return broken


@contextmanager
def value_that_cannot_be_saved(run):
    run.checkpointer.session.dense.values = lambda: {"bad": object()}
    yield
    run.checkpointer.session.dense.values = dict


@contextmanager
def error_in_the_callers_value(run):
    run.checkpointer.session.dense.values = lambda: 1 / 0
    yield
    run.checkpointer.session.dense.values = dict


@contextmanager
def another_dtype(run):
    weight = run.model.tables["big"].weight
    data, weight.data = weight.data, weight.data.half()
    yield
    weight.data = data


ROW = (lambda model: model.tables["big"].weight, 0, 1)  # row 0 is looked up often
WAYS = [
    (segments_become_a_file, StoreError, "segments' was moved"),
    (nan_in(*ROW), NanError, "table 'tables.big', row 0: weight is NaN"),
    (nan_in(lambda model: model.linear.bias, 1), NanError, "parameter 'linear.bias' holds NaN"),
    (value_that_cannot_be_saved, UsageError, "dense.extra.values.bad is a object"),
    (error_in_the_callers_value, ZeroDivisionError, "division by zero"),
    (another_dtype, UsageError, "another shape or d"),
]


@pytest.mark.parametrize(("broken", "cause", "told"), WAYS)
def test_a_failed_save_costs_itself_alone_and_is_told(tmp_path, broken, cause, told):
    run = Trained(tmp_path / "store", optimizer="sgd", **OPTIONS)
    checkpointer = run.checkpointer
    run.train(1)
    checkpointer.wait()
    run.train(3)
    run.save()
    run.train(2)
    before = tracker_state(checkpointer)
    warned = nullcontext()
    if broken is another_dtype:  # which changes the table as a whole
        warned = pytest.warns(UntrackedChangeWarning, match=r"'tables\.big'.*has other memory")
        counts = [count + 1 for count in before["tables.big"][1]]
        before["tables.big"] = (list(range(200)), counts)
    segments = [record for record, _ in row_records(run.store)]
    with broken(run), warned:
        assert checkpointer.save("partial").number == 3
        with pytest.raises(SnapshotError, match="snapshot 3 failed") as failure:
            checkpointer.wait()
        assert isinstance(failure.value.__cause__, cause), failure.value.__cause__
        assert told in str(failure.value.__cause__)
        assert tracker_state(checkpointer) == before
        assert checkpointer.metrics.failed_snapshots == 1

        # Once more, and no one waits: the next step warns.
        checkpointer.schedule = cpr_ext.EverySteps(1)
        assert checkpointer.step().wait_until_done(30)
        checkpointer.schedule = NEVER
        with pytest.warns(SnapshotFailedWarning, match="training continues"):
            checkpointer.step()
        assert checkpointer.metrics.failed_snapshots == 2
        assert tracker_state(checkpointer) == before
        assert [record for record, _ in row_records(run.store)] == segments
    run.train(1)
    run.save()
    after = tracker_state(checkpointer)["tables.big"][0]
    assert len(after) < len(before["tables.big"][0])
    rows = run.rows()
    run.save("base")
    checkpointer.close()  # good snapshots were committed since
    fresh = Trained(tmp_path / "store", seed=5, optimizer="sgd", **OPTIONS)
    assert fresh.checkpointer.recover().damaged_segments == []
    assert_same(fresh.rows(), rows)


def test_after_a_base_that_failed_and_a_partial_one_the_next_is_a_base_and_a_point(
    tmp_path, monkeypatch
):
    """A failed base leaves rows without hashes: nothing without all of them can be checked."""
    run = Trained(tmp_path / "store", priority=cpr_ext.AllRows(), **OPTIONS)
    run.train(1)
    run.checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", lambda *_, **__: 1 / 0)
        run.checkpointer.save("base")
        with pytest.raises(SnapshotError):
            run.checkpointer.wait()
    run.checkpointer.schedule = cpr_ext.EverySteps(1)
    found = []
    for _ in range(3):
        run.train(1)
        run.checkpointer.wait()
        newest = run.store.manifest.newest
        found.append((run.store.manifest.rows[-1].kind, newest.is_complete))
    assert found == [("partial", False), ("base", True), ("partial", True)]
    run.checkpointer.close()


def test_nan_is_saved_when_asked_for(tmp_path):
    options = {**OPTIONS, "store": cpr_ext.StoreOptions(None, on_nan="save")}
    run = Trained(tmp_path, optimizer="sgd", **options)
    run.train(1)
    with torch.no_grad():
        run.model.tables["big"].weight[5] = float("nan")
        run.model.linear.bias[0] = float("nan")
    run.save("base")
    state = run.state()
    run.die()
    fresh = Trained(tmp_path, optimizer="sgd", seed=2, **OPTIONS)
    fresh.checkpointer.recover()
    assert_same(fresh.state(), state)


@pytest.mark.parametrize("what", ["weight.data", "optimizer state", "parameter"])
def test_memory_replaced_during_a_capture_fails_that_snapshot(tmp_path, what):
    """Rows captured afterwards would be those of memory that training has left."""
    staging, tables = cpr_ext.StagingOptions(slot_bytes=128 << 10), {"a": (18_000, 8)}
    run = Trained(tmp_path, tables, staging=staging, schedule=cpr_ext.EverySteps(1000))
    run.train(1)
    assert run.checkpointer._saver.in_flight.state == "capturing"
    module, optimizer = run.model.tables["a"], run.optimizers[0]
    if what == "weight.data":
        module.weight.data = module.weight.data.clone()
    elif what == "optimizer state":
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state[module.weight]["sum"] = optimizer.state[module.weight]["sum"].clone()
    else:
        old, module.weight = module.weight, torch.nn.Parameter(module.weight.detach().clone())
    run.train(1)
    with pytest.warns(SnapshotFailedWarning, match="replaced"):
        run.train(1)
    if what == "parameter":
        module.weight = old
    run.save("base")
    rows = run.rows()
    run.checkpointer.close()
    fresh = Trained(tmp_path, tables, seed=1)
    fresh.checkpointer.recover()
    assert_same(fresh.rows(), rows)


def test_sparse_momentum_fails_the_snapshot_with_the_remedy_and_training_goes_on(tmp_path):
    model = torch.nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match=r"momentum_buffer.*without momentum"):
        cpr_ext.Checkpointer(model, optimizer, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    optimizer.param_groups[0]["momentum"] = 0  # and sets it later
    checkpointer = cpr_ext.Checkpointer(model, optimizer, tmp_path, schedule=cpr_ext.EverySteps(2))
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.warns(SnapshotFailedWarning, match=r"momentum_buffer.*without m"):  # noqa: PT031
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
            checkpointer.step()
    assert checkpointer.step_count == 5
    assert checkpointer.store.is_empty
    with pytest.raises(SnapshotError, match="momentum_buffer"):
        checkpointer.close()


def test_a_diverged_row_that_a_priority_has_to_rank_fails_the_snapshot_not_the_training(tmp_path):
    run = Trained(tmp_path, {"a": (100, 4)}, priority=cpr_ext.LargestChange(), **OPTIONS)
    run.train(3)
    run.checkpointer.wait()
    weight = run.model.tables["a"].weight
    with torch.no_grad():
        good = weight[0].clone()
        weight[0] = float("nan")
    with pytest.warns(UntrackedChangeWarning, match=r"'tables\.a'.*written in place"):
        run.checkpointer.save()
    with pytest.raises(SnapshotError) as failure:
        run.checkpointer.wait()
    assert isinstance(failure.value.__cause__, NanError)
    assert tracker_state(run.checkpointer)["tables.a"][0] == list(range(100))
    with torch.no_grad():
        weight[0] = good
    assert run.save().state == "committed"


def test_a_failed_first_base_is_tried_again_by_schedule_not_at_every_step(tmp_path):
    run = Trained(tmp_path, optimizer="sgd", schedule=cpr_ext.EverySteps(4))
    weight = run.model.tables["big"].weight.data
    good, weight[0, 0] = weight[0, 0].item(), float("nan")
    begun = []
    with pytest.warns(SnapshotFailedWarning):  # noqa: PT031
        for _ in range(9):
            snapshot = run.checkpointer.step()
            if snapshot is not None:
                begun.append((run.checkpointer.step_count, snapshot.kind))
                snapshot.wait_until_done(30)
    assert begun == [(1, "base"), (5, "base"), (9, "base")]
    weight[0, 0] = good
    with pytest.warns(SnapshotFailedWarning):
        run.train(1)
    run.train(5)
    run.checkpointer.wait()
    assert run.checkpointer.metrics.base_snapshots == 1
    assert run.checkpointer.metrics.failed_snapshots == 3


def test_a_with_block_that_an_error_leaves_gives_the_store_back_once_no_thread_writes_into_it(
    tmp_path,
):
    """Else the end of an old writer could remove a file of the next checkpointer's snapshot."""

    def fail_inside(checkpointer):
        with checkpointer:
            run.train(1)
            raise ZeroDivisionError

    # A slot large enough for its writing to take longer than the end of the block.
    staging = cpr_ext.StagingOptions(slot_bytes=8 << 20)
    for _ in range(5):
        run = Trained(tmp_path, {"a": (600_000, 16)}, optimizer="sgd", staging=staging)
        with pytest.raises(ZeroDivisionError):
            fail_inside(run.checkpointer)
        assert not list(tmp_path.rglob("*.safetensors"))
        assert run.checkpointer._saver._parts.context.pipeline.num_free_slots == 3
