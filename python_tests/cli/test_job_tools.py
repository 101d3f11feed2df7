"""The tools given the directory of a whole job, with stores that are not as they should be."""

import json
import os
import shutil

import pytest
from safetensors.torch import load_file

from cpr_ext.errors import StoreError
from cpr_ext.storage.job_stores import find_stores, worker_directory
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import compact_job, inspect_job, verify, verify_job
from python_tests.helpers import assert_same, flip
from python_tests.tools.maintenance.jobs import DIM, WorkerAlone, make_job, parts_of

WORKER_1 = "worker-00001-of-00003"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A job of three workers with something to merge; worker 2 is three steps ahead."""
    directory = tmp_path_factory.mktemp("jobs") / "job"
    for rank, part in enumerate(parts_of(3)):
        worker = WorkerAlone(worker_directory(directory, rank, 3), part, seed=rank)
        worker.save()
        for _ in range(3):
            worker.train(2 + (rank == 2))
            worker.save("partial")
        worker.checkpointer.close()
    return directory


@pytest.fixture
def job(made, tmp_path):
    return shutil.copytree(made, tmp_path / "job")


def damage(job):
    """Flip a bit of rows that compaction reads, of worker 1; returns the file."""
    manifest = StoreReader(job / WORKER_1).shards[0]
    path = manifest.path_of(manifest.segments[1])
    flip(path, manifest.segments[1].header_bytes + 3)
    return path


def foreign(job, **options):
    """Put another job's store in the place of worker 1."""
    make_job(job.parent / "foreign", **options)
    shutil.rmtree(job / WORKER_1)
    shutil.move(job.parent / "foreign" / WORKER_1, job / WORKER_1)


def test_inspect_shows_every_worker_and_the_whole_tables(cpr, job):
    code, out, _ = cpr("inspect", job)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith(f"{job}: 3 workers, 1 table, ")
    assert lines[1] == []
    worker_1 = next(line for line in lines if line[:1] == ["1"])
    assert " ".join(worker_1).endswith(" 6 48 3 0")
    assert "items 30 4 F32 3 sum F32 4 960 B" in [" ".join(line) for line in lines]
    assert "note: the newest snapshots are of different steps" in out
    assert max(map(len, out.splitlines())) < 120


def test_inspect_of_a_table_asks_for_one_store(cpr, job):
    code, _, err = cpr("inspect", job, "--table", "items")
    assert code == 2
    assert "worker-00000-of-00003" in err
    assert cpr("inspect", job / WORKER_1, "--table", "items[10:20, 0:4]")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["inspect"], "workers"),
        (["verify"], "is_sound"),
        (["compact"], "refused"),
        (["repair"], "refused"),
        (["export", "OUT"], "dense_from"),
    ],
)
def test_json_is_one_document(cpr, job, tmp_path, arguments, field):
    command, *more = arguments
    code, out, _ = cpr(command, job, *[tmp_path / "out" for _ in more], "--json")
    assert code == 0
    assert field in json.loads(out)


def test_verify_of_a_whole_job_says_so(cpr, job):
    code, out, _ = cpr("verify", job)
    assert code == 0
    assert out.count("no damage; checked") == 3
    assert out.endswith(f"{job}: 3 stores: no damage, and they fit together\n")
    assert "note: the newest snapshots are of different steps (6: workers 0, 1; 9: worker 2)" in out


def test_a_damaged_store_is_named_and_the_others_are_looked_at(cpr, job):
    path = damage(job)
    code, out, _ = cpr("verify", job)
    assert code == 1
    assert f"damaged: {path}: " in out
    assert out.count("no damage; checked") == 2
    assert "note: whether the stores fit together was not looked at, as one is damaged" in out
    assert out.endswith("3 stores: 1 damaged, 0 faults between them\n")


def test_a_store_that_cannot_be_read_is_a_line_of_inspect(cpr, job):
    (job / WORKER_1 / "dense" / "MANIFEST.json").write_text("{}")
    code, out, _ = cpr("inspect", job)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" damaged")] == ["1"]
    assert f"damaged: {job / WORKER_1}" in out
    assert not inspect_job(job).is_sound
    assert cpr("verify", job)[0] == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "compact", "repair", "export"])
def test_a_missing_store_is_named_by_every_tool(cpr, job, tmp_path, command):
    shutil.rmtree(job / WORKER_1)
    code, out, err = cpr(command, job, *([tmp_path / "out"] if command == "export" else []))
    assert code == 1
    assert WORKER_1 in out + err
    if command in ("inspect", "verify"):
        assert "table 'items': no worker holds 40 of its values" in out


def test_a_store_that_is_empty_where_a_workers_should_be_is_damage(cpr, job):
    shutil.rmtree(job / WORKER_1)
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


def test_a_store_of_another_part_is_a_fault_for_inspect_too(cpr, job):
    shutil.rmtree(job / WORKER_1)
    shutil.copytree(job / "worker-00000-of-00003", job / WORKER_1)
    for command in ("inspect", "verify"):
        code, out, _ = cpr(command, job)
        assert code == 1
        assert "wrong: workers 0 and 1 both hold 'items[0:10, 0:4]'" in out


def test_a_store_beside_those_of_the_workers_is_left_alone_and_named(cpr, job):
    shutil.copytree(job / WORKER_1, job / "backup")
    before = sorted(path.name for path in (job / "backup").rglob("*"))
    for command in ("inspect", "verify"):
        code, out, _ = cpr(command, job)
        assert code == 0
        assert "note: backup is a store, but not of a worker" in out
    assert cpr("compact", job)[0] == 0
    assert sorted(path.name for path in (job / "backup").rglob("*")) == before


def test_rows_that_nobody_places_are_a_note_and_not_called_whole(cpr, tmp_path):
    make_job(tmp_path / "job", says_part=False)
    for command in ("inspect", "verify"):
        code, out, _ = cpr(command, tmp_path / "job")
        assert code == 0
        assert "whether it is whole cannot be seen" in out
    assert inspect_job(tmp_path / "job").tables[0].is_placed is False
    code, _, err = cpr("export", tmp_path / "job", tmp_path / "out")
    assert code == 1
    assert "--rows-in-order" in err
    assert cpr("export", tmp_path / "job", tmp_path / "out", "--rows-in-order")[0] == 0


def test_compact_merges_each_store_and_changes_no_row(cpr, job, tmp_path):
    assert cpr("export", job, tmp_path / "before")[0] == 0
    code, out, _ = cpr("compact", job)
    assert code == 0
    assert out.count(" became ") == 3
    assert verify_job(job).is_sound
    assert cpr("export", job, tmp_path / "after")[0] == 0
    for file in ("model.safetensors", "optimizer_rows.safetensors"):
        assert_same(load_file(tmp_path / "after" / file), load_file(tmp_path / "before" / file))
    assert cpr("compact", job)[1].count("nothing to merge") == 3


def test_a_store_in_use_is_left_as_it_is_and_the_others_are_compacted(cpr, job):
    trains = WorkerAlone(job / WORKER_1, parts_of(3)[1])
    segments = count_segments(job / WORKER_1)
    for command in ("inspect", "verify"):
        assert cpr(command, job)[0] == 0
    code, out, _ = cpr("compact", job)
    assert code == 1
    assert out.count(" became ") == 2
    assert f"left as it is: {job / WORKER_1}: " in out
    assert f"process {os.getpid()}" in out
    assert count_segments(job / WORKER_1) == segments
    code, out, _ = cpr("repair", job, "--apply")
    assert code == 1
    assert f"process {os.getpid()}" in out
    trains.checkpointer.close()
    assert cpr("compact", job)[0] == 0
    assert count_segments(job / WORKER_1) < segments


def count_segments(store):
    return sum(len(manifest.segments) for manifest in StoreReader(store).shards)


def test_a_damaged_store_is_left_as_it_is_by_compact_and_mended_by_repair(cpr, job):
    path = damage(job)
    report = compact_job(job)
    assert [left.path for left in report.refused] == [str(job / WORKER_1)]
    assert path.name in report.refused[0].reason
    code, out, _ = cpr("repair", job)
    assert code == 1
    assert f"damaged: {path}" in out
    assert out.count("nothing is damaged") == 2
    code, out, _ = cpr("repair", job, "--apply")
    assert code == 0
    assert "repaired, training resumes from step 6" in out
    assert verify(job / WORKER_1).is_sound


def test_a_directory_without_stores_is_one_line_with_the_remedy(cpr, tmp_path):
    (tmp_path / "some" / "thing").mkdir(parents=True)
    for command in ("inspect", "verify", "compact", "repair"):
        code, out, err = cpr(command, tmp_path)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert "name a store, or the directory that holds the stores of all workers" in err


def test_a_link_to_a_store_is_not_followed(job, tmp_path):
    (tmp_path / "links").mkdir()
    for store in job.iterdir():
        (tmp_path / "links" / store.name).symlink_to(store)
    with pytest.raises(StoreError, match="links are not followed"):
        find_stores(tmp_path / "links")


def test_stores_of_any_name_are_sorted_by_number(tmp_path):
    for name in ("rank-10", "rank-9", "rank-0"):
        (tmp_path / name / "shard-00000").mkdir(parents=True)
    assert find_stores(tmp_path).workers == ["rank-0", "rank-9", "rank-10"]


@pytest.mark.parametrize("command", ["inspect", "verify", "compact", "repair", "export"])
def test_help_says_that_a_job_may_be_given(cpr, command):
    code, out, _ = cpr(command, "--help")
    assert code == 0
    assert "the directory that holds the stores of all workers of a job" in " ".join(out.split())


def test_export_tells_the_steps_and_where_the_dense_part_is_from(cpr, job, tmp_path):
    code, out, _ = cpr("export", job, tmp_path / "out")
    assert code == 0
    assert "of step 9: export.json, model.safetensors, optimizer_rows.safetensors" in out
    assert "worker 0: snapshot of step 6\n" in out
    assert "worker 2: snapshot of step 9, the dense part is its\n" in out
    assert "rows: the newest saved state of each, perhaps of older steps" in out
    assert "note: the newest snapshots are of different steps" in out
    code, out, _ = cpr("export", job, tmp_path / "full", "--full")
    assert code == 0
    assert "of step 0: " in out
    assert "rows: " not in out


@pytest.mark.parametrize("command", ["launch", "prove"])
def test_more_processes_than_a_machine_has_are_refused(cpr, command):
    code, _, err = cpr(command, "--nproc", "9" * 30, "script.py")
    assert code == 2
    assert "is not in the range 1<=x<=1024" in err
