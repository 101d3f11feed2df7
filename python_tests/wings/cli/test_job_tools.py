"""The tools given the directory of a whole job, with stores that are not as they should be."""

import os
import shutil

import pytest

from cpr_ext.errors import StoreError
from cpr_ext.storage.job_stores import find_stores
from cpr_ext.wings.tools.maintenance import inspect_job
from python_tests.wings.tools.maintenance.jobs import (
    DIM,
    WORKER_1,
    WorkerAlone,
    foreign,
    make_job,
    parts_of,
    uneven_job,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return uneven_job(tmp_path_factory.mktemp("jobs") / "job")


@pytest.fixture
def job(made, tmp_path):
    return shutil.copytree(made, tmp_path / "job")


def test_a_store_that_cannot_be_read_is_a_line_of_inspect(cpr, job):
    (job / WORKER_1 / "MANIFEST.json").write_text("{}")
    code, out, _ = cpr("inspect", job)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" damaged")] == ["1"]
    assert f"damaged: {job / WORKER_1}" in out
    assert not inspect_job(job).is_sound
    assert cpr("verify", job)[0] == 1


def test_a_missing_or_empty_store_is_named_by_every_tool(cpr, job, tmp_path):
    shutil.rmtree(job / WORKER_1)
    for command in ("inspect", "verify", "export"):
        code, out, err = cpr(command, job, *([tmp_path / "out"] if command == "export" else []))
        assert code == 1
        assert WORKER_1 in out + err
        missing = "table 'items': no worker holds 40 of its values"
        assert (missing in out) == (command in ("inspect", "verify"))
    (job / WORKER_1).mkdir()
    for command in ("inspect", "verify"):
        code, out, _ = cpr(command, job)
        assert code == 1
        assert f"'{job / WORKER_1}' is not a cpr_ext store" in out


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"dense_shape": (DIM, 3)}, "worker 1 has another model than worker 0: 'linear.bias', "),
        ({"steps": (1, 1, 1), "says_part": False}, "table 'items' is a whole one in a store"),
    ],
    ids=["dense part", "table"],
)
def test_a_foreign_store_is_a_fault(cpr, job, options, fault):
    foreign(job, **options)
    code, out, _ = cpr("verify", job)
    assert code == 1
    assert f"wrong: {fault}" in out
    assert "0 damaged" in out


def test_a_store_of_another_part_is_a_fault_and_one_beside_the_workers_is_a_note(cpr, job):
    shutil.copytree(job / WORKER_1, job / "backup")
    for expected, told in (
        (0, "note: backup is a store, but not of a worker"),
        (1, "wrong: workers 0 and 1 both hold 'items[0:10, 0:4]'"),
    ):
        for command in ("inspect", "verify"):
            code, out, _ = cpr(command, job)
            assert code == expected
            assert told in out
        shutil.rmtree(job / WORKER_1)
        shutil.copytree(job / "worker-00000-of-00003", job / WORKER_1)


def test_rows_that_nobody_places_are_a_note_and_not_called_whole(cpr, tmp_path):
    make_job(tmp_path / "job", says_part=False)
    for command in ("inspect", "verify"):
        code, out, _ = cpr(command, tmp_path / "job")
        assert code == 0
        assert "whether it is whole cannot be seen" in out
    code, _, err = cpr("export", tmp_path / "job", tmp_path / "out")
    assert code == 1
    assert "--rows-in-order" in err
    assert cpr("export", tmp_path / "job", tmp_path / "out", "--rows-in-order")[0] == 0


def test_a_store_in_use_is_left_as_it_is_and_links_are_not_followed(cpr, job, tmp_path):
    trains = WorkerAlone(job / WORKER_1, parts_of(3)[1])
    for command in ("inspect", "verify"):
        assert cpr(command, job)[0] == 0
    code, _, err = cpr("repair", job / WORKER_1, "--apply")
    assert code == 1
    assert f"process {os.getpid()}" in err
    trains.checkpointer.close()
    assert cpr("repair", job / WORKER_1, "--apply")[0] == 0
    (tmp_path / "links").mkdir()
    for store in job.iterdir():
        (tmp_path / "links" / store.name).symlink_to(store)
    with pytest.raises(StoreError, match="links are not followed"):
        find_stores(tmp_path / "links")
