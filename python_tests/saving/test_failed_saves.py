"""A failed save never kills training, and is never silent."""

import warnings

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
from python_tests.helpers import Trained, assert_same, run_python
from python_tests.saving.failures import OPTIONS, fail_and_go_on, tracker_state


@pytest.fixture
def run(tmp_path):
    """Trained for a base snapshot and three steps more; nothing is in flight."""
    run = Trained(tmp_path / "store", optimizer="sgd", **OPTIONS)
    run.train(1)
    run.checkpointer.wait()
    run.train(3)
    yield run
    if not run.checkpointer._guard.is_closed:
        run.checkpointer._release()


def test_a_directory_of_segments_that_became_a_file_fails_the_save_and_nothing_else(run):
    segments = run.store.segments
    hidden = run.store.directory / "hidden"

    def break_it():
        segments.rename(hidden)
        segments.write_text("not a directory")

    def mend_it():
        segments.unlink()
        hidden.rename(segments)

    fail_and_go_on(run, break_it, mend_it, StoreError, "segments' was moved")


def test_a_nan_row_is_named_and_does_not_replace_its_last_good_state(run):
    weight = run.model.tables["big"].weight.data
    good = weight[0, 1].item()  # row 0 is looked up often

    def set_value(value):
        weight[0, 1] = value

    fail_and_go_on(
        run,
        lambda: set_value(float("nan")),
        lambda: set_value(good),
        NanError,
        "table 'tables.big', row 0: weight is NaN",
    )


def test_a_nan_in_the_dense_part_is_named(run):
    bias = run.model.linear.bias.data
    good = bias[1].item()

    def set_value(value):
        bias[1] = value

    fail_and_go_on(
        run,
        lambda: set_value(float("nan")),
        lambda: set_value(good),
        NanError,
        "parameter 'linear.bias' holds NaN",
    )


def test_nan_is_saved_when_asked_for(tmp_path):
    options = {**OPTIONS, "store": cpr_ext.StoreOptions(None, on_nan="save")}
    run = Trained(tmp_path, optimizer="sgd", **options)
    run.train(1)
    with torch.no_grad():
        run.model.tables["big"].weight[5] = float("nan")
        run.model.linear.bias[0] = float("nan")
    run.checkpointer.save("base")
    assert run.checkpointer.wait()
    state = run.state()
    run.die()
    fresh = Trained(tmp_path, optimizer="sgd", seed=2, **OPTIONS)
    fresh.checkpointer.recover()
    assert_same(fresh.state(), state)
    fresh.checkpointer.close()


def test_a_value_that_cannot_be_saved_fails_the_snapshot_not_the_training(run):
    states = {"bad": object()}

    def mend():
        states.clear()

    run.checkpointer.session.dense.values = lambda: dict(states)
    states.clear()
    fail_and_go_on(
        run,
        lambda: states.update(bad=object()),
        mend,
        UsageError,
        "dense.extra.values.bad is a object",
    )


def test_an_error_in_the_callers_value_fails_the_snapshot_not_the_training(run):
    broken = []

    def extra():
        if broken:
            raise ZeroDivisionError("in the caller's code")
        return {}

    run.checkpointer.session.dense.values = extra
    fail_and_go_on(
        run, lambda: broken.append(1), broken.clear, ZeroDivisionError, "in the caller's code"
    )


@pytest.mark.parametrize("what", ["weight.data", "optimizer state", "parameter"])
def test_memory_replaced_during_a_capture_fails_that_snapshot(tmp_path, what):
    """Rows captured afterwards would be those of memory that training has left."""
    run = Trained(
        tmp_path,
        {"a": (18_000, 8)},
        optimizer="adagrad",
        num_shards=2,
        staging=cpr_ext.StagingOptions(slot_bytes=128 << 10),
        schedule=cpr_ext.EverySteps(1000),
    )
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
    run.checkpointer.save("base")
    assert run.checkpointer.wait()
    rows = run.rows()
    run.checkpointer.close()
    fresh = Trained(tmp_path, {"a": (18_000, 8)}, seed=1, num_shards=2)
    fresh.checkpointer.recover()
    assert_same(fresh.rows(), rows)
    fresh.checkpointer.close()


def test_a_table_that_changed_its_dtype_is_not_saved_into_a_store_of_another(run):
    weight = run.model.tables["big"].weight
    data = weight.data

    def replace(value):
        weight.data = value

    with pytest.warns(UntrackedChangeWarning, match=r"'tables\.big'.*has other memory"):
        fail_and_go_on(
            run,
            lambda: replace(data.half()),
            lambda: replace(data),
            UsageError,
            "another shape or d",
            changes=["tables.big"],
        )


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
    run = Trained(
        tmp_path, {"a": (100, 4)}, optimizer="sgd", priority=cpr_ext.LargestChange(), **OPTIONS
    )
    run.train(3)
    run.checkpointer.wait()
    with torch.no_grad():
        good = run.model.tables["a"].weight[0].clone()
        run.model.tables["a"].weight[0] = float("nan")
    with pytest.warns(UntrackedChangeWarning, match=r"'tables\.a'.*written in place"):
        run.checkpointer.save()
    with pytest.raises(SnapshotError) as failure:
        run.checkpointer.wait()
    assert isinstance(failure.value.__cause__, NanError)
    assert tracker_state(run.checkpointer)["tables.a"][0] == list(range(100))
    with torch.no_grad():
        run.model.tables["a"].weight[0] = good
    run.checkpointer.save()
    assert run.checkpointer.wait()
    run.checkpointer.close()


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
    run.checkpointer.close()


def test_close_gives_everything_back_even_when_it_raises(tmp_path):
    run = Trained(tmp_path, optimizer="sgd", **OPTIONS)
    with torch.no_grad():
        run.model.tables["big"].weight[0] = float("nan")
    run.checkpointer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning itself becomes an exception
        with pytest.raises((SnapshotError, SnapshotFailedWarning)):
            run.checkpointer.close()
    assert not any(module._forward_pre_hooks for module in run.model.modules())
    again = Trained(tmp_path, optimizer="sgd", **OPTIONS)  # the locks are free
    run.checkpointer.close()  # closing twice is fine
    again.checkpointer.close()


def test_leaving_a_with_block_by_an_error_keeps_that_error_and_frees_the_store(tmp_path):
    run = Trained(
        tmp_path,
        {"a": (6000, 8)},
        num_shards=2,
        staging=cpr_ext.StagingOptions(slot_bytes=64 << 10),
    )

    def fail_inside():
        with run.checkpointer:
            run.train(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not list(tmp_path.rglob("*.safetensors"))
    Trained(tmp_path, {"a": (6000, 8)}, num_shards=2).checkpointer.close()


FULL_DISK = """
import resource, signal, sys, warnings
import pytest, torch, cpr_ext
from cpr_ext.errors import SnapshotError, SnapshotFailedWarning, StorageError
from python_tests.helpers import Trained, assert_same
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = Trained(
    sys.argv[1], {"a": (2000, 8)}, optimizer="sgd", num_shards=2,
    schedule=cpr_ext.EverySteps(1000),
    staging=cpr_ext.StagingOptions(direct_io=sys.argv[2] == "direct"),
)
run.train(2)
run.checkpointer.wait()
dirty = run.checkpointer._trackers["tables.a"].dirty_rows(0, 2000).tolist()
assert dirty
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limit[1]))
run.checkpointer.save("base")
with pytest.raises(SnapshotError) as failure:
    run.checkpointer.wait()
cause = failure.value.__cause__
assert isinstance(cause, StorageError) and isinstance(cause, OSError), repr(cause)
assert cause.errno == 27 and "base.safetensors" in str(cause), str(cause)
assert run.checkpointer._trackers["tables.a"].dirty_rows(0, 2000).tolist() == dirty
before = run.state()
run.train(1)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
names = sorted(path.name for path in run.store.directory.rglob("*.safetensors"))
assert names == ["00000001-base.safetensors", "00000001-dense.safetensors"], names
run.checkpointer.save("base")
assert run.checkpointer.wait()
rows = run.rows()
run.die()
fresh = Trained(sys.argv[1], {"a": (2000, 8)}, optimizer="sgd", num_shards=2, seed=3)
fresh.checkpointer.recover()
assert_same(fresh.rows(), rows)
print("all good")
"""


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_disk_that_takes_no_more_fails_the_save_and_leaves_no_half_written_file(tmp_path, mode):
    assert run_python(FULL_DISK, tmp_path, mode).endswith("all good\n")


def test_a_store_is_given_back_only_when_no_thread_writes_into_it_any_more(tmp_path):
    """Else the end of an old writer could remove a file of the next checkpointer's snapshot."""

    def fail_inside(checkpointer):
        with checkpointer:
            run.train(1)
            raise ZeroDivisionError

    for _ in range(5):
        # A slot large enough for its writing to take longer than the end of the block.
        run = Trained(
            tmp_path,
            {"a": (600_000, 16)},
            optimizer="sgd",
            staging=cpr_ext.StagingOptions(slot_bytes=8 << 20),
        )
        with pytest.raises(ZeroDivisionError):
            fail_inside(run.checkpointer)
        assert not list(tmp_path.rglob("*.safetensors"))
        assert run.checkpointer._saver._parts.context.pipeline.num_free_slots == 3
