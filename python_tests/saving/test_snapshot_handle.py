"""What users see of a snapshot: its state, its step, its bytes, its error."""

from unittest.mock import patch

import pytest

import cpr_ext
from python_tests.helpers import Trained


@pytest.fixture
def run(tmp_path):
    return Trained(tmp_path, schedule=cpr_ext.EverySteps(1000))


def test_a_committed_snapshot_names_its_step_and_its_bytes(run):
    first = run.checkpointer.step()
    assert isinstance(first, cpr_ext.SnapshotHandle)
    assert (first.kind, first.step, run.checkpointer.step()) == ("base", 1, None)
    run.train(1)
    run.checkpointer.wait()
    handle = run.checkpointer.save("base")
    assert handle.wait_until_done(60)
    assert handle.is_done
    assert (handle.state, handle.kind, handle.step, handle.error) == ("committed", "base", 3, None)
    text = f"kind='base', state='committed', number={handle.number}, step=3, is_complete=True"
    assert text in repr(handle)
    newest = [records[-1] for records in (run.store.manifest.rows, run.store.manifest.dense)]
    assert {record.snapshot for record in newest} == {handle.number}
    assert handle.file_bytes == sum(record.file_bytes for record in newest)


def test_a_failed_snapshot_has_its_error_and_no_point_is_promised_before_it_is_durable(run):
    run.train(1)
    run.checkpointer.wait()
    promised = []

    def fail(*_):
        handle = cpr_ext.SnapshotHandle("base", run.checkpointer._saver.in_flight)
        promised.append(handle.is_complete)
        raise OSError("no space left")

    with patch.object(run.store, "add", fail):
        handle = run.checkpointer.save("base")
        assert handle.wait_until_done(60)
    assert (handle.state, handle.is_complete, promised) == ("failed", False, [False])
    assert isinstance(handle.error, OSError)
    with pytest.raises(cpr_ext.SnapshotError):
        run.checkpointer.wait()
