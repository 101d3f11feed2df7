"""Commits that failed after the rename: on disk or not, nobody knows until the next sync."""

import pytest

import cpr_ext
from cpr_ext.errors import StorageError
from cpr_ext.storage import checksummed_json
from cpr_ext.storage.manifest import read_manifest
from cpr_ext.wings.tools.maintenance import verify
from python_tests.helpers import Trained

OPTIONS = {"num_shards": 2, "priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(1000)}


def test_going_back_takes_a_commit_in_doubt_back_too(tmp_path, monkeypatch):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.save("base")
    kept = run.store.manifest.dense
    run.train(1)
    sync = checksummed_json.sync_directory

    def refuse(directory):
        if directory == tmp_path:
            raise StorageError(5, "cannot sync", str(directory))
        sync(directory)

    monkeypatch.setattr(checksummed_json, "sync_directory", refuse)
    run.checkpointer.save("base")
    with pytest.raises(cpr_ext.errors.SnapshotError):
        run.checkpointer.wait()
    assert run.store.is_in_doubt
    assert read_manifest(tmp_path).dense != kept  # it is there
    assert verify(tmp_path).is_sound  # with its files
    monkeypatch.undo()
    run.checkpointer.recover(mode="full")
    assert read_manifest(tmp_path).dense == kept
    assert not run.store.is_in_doubt
    named = {record.file for record in read_manifest(tmp_path).records()}
    assert {path.name for path in (tmp_path / "segments").iterdir()} == named
    run.die()
