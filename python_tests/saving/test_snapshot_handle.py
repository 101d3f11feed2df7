"""What users see of a snapshot: its state, its step, its bytes, its error."""

from unittest.mock import patch

import pytest

import cpr_ext
from python_tests.helpers import Trained


@pytest.fixture
def run(tmp_path):
    run = Trained(tmp_path, schedule=cpr_ext.EverySteps(1000))
    yield run
    run.checkpointer.close()


def test_a_committed_snapshot_names_its_step_and_its_bytes(run):
    run.train(3)
    run.checkpointer.wait()
    handle = run.checkpointer.save("base")
    assert isinstance(handle, cpr_ext.SnapshotHandle)
    assert handle.wait_until_done(60)
    assert handle.is_done
    assert (handle.state, handle.kind, handle.step, handle.error) == ("committed", "base", 3, None)
    assert handle.is_complete
    manifest = run.store.manifest
    newest = [records[-1] for records in (manifest.rows, manifest.dense)]
    assert {record.snapshot for record in newest} == {handle.number}
    assert handle.file_bytes == sum(record.file_bytes for record in newest)


def test_step_returns_a_handle_of_the_snapshot_that_begins(run):
    handle = run.checkpointer.step()
    assert isinstance(handle, cpr_ext.SnapshotHandle)
    assert (handle.kind, handle.step) == ("base", 1)
    assert run.checkpointer.step() is None


@pytest.mark.filterwarnings("ignore::cpr_ext.errors.UntrackedChangeWarning")
def test_a_failed_snapshot_has_its_error(run):
    run.train(1)
    run.checkpointer.wait()
    run.model.tables["big"].weight.data[3, 1] = float("nan")
    handle = run.checkpointer.save("base")
    assert handle.wait_until_done(60)
    assert (handle.state, handle.is_complete) == ("failed", False)
    assert isinstance(handle.error, cpr_ext.NanError)
    with pytest.raises(cpr_ext.SnapshotError):
        run.checkpointer.wait()


def test_no_point_is_promised_before_it_is_durable(run):
    """Its commit may fail yet."""
    run.train(1)
    run.checkpointer.wait()
    said = []

    def fail(*_):
        handle = cpr_ext.SnapshotHandle("base", run.checkpointer._saver.in_flight)
        said.append(handle.is_complete)
        raise OSError("no space left")

    with patch.object(run.store, "add", fail):
        assert run.checkpointer.save("base").wait_until_done(60)
    assert said == [False]
    with pytest.raises(cpr_ext.SnapshotError):
        run.checkpointer.wait()


def test_a_handle_prints_what_it_knows(run):
    handle = run.checkpointer.save("base")
    assert handle.wait_until_done(60)
    text = f"kind='base', state='committed', number={handle.number}, step=0, is_complete=True"
    assert text in repr(handle)
