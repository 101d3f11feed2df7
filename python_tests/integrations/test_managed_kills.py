"""Jobs with managed collisions are killed at random: no row returns under another id."""

import json
import os
import pickle
import random
import shutil
import signal
import time
from itertools import count

import pytest

from cpr_ext.storage.manifest import read_manifest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

JOB = "python_tests.integrations.managed_kill_job"
WAIT_SECONDS = 100


@pytest.mark.parametrize("options", ["default", "points"])
@pytest.mark.parametrize(
    ("world_size", "kills"),
    [(2, 2), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (1, 3, 4))],
)
def test_a_killed_job_has_each_row_under_its_id(
    torchrec_nursery, tmp_path, world_size, kills, options
):
    chance, numbers = random.Random(), count()
    job, steps = tmp_path / "job", 0
    job.mkdir()
    for life in range(kills):
        (job / "given.json").write_text(json.dumps({"life": life, "options": options}))
        ranks = [
            torchrec_nursery.ask("call", JOB, "train", str(job), rank, world_size)
            for rank in range(world_size)
        ]
        wanted = steps + chance.randint(12, 30)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            # A busy disk may take longer than these steps for the first snapshot.
            if max(notes(job, 0), default=0) >= wanted and num_durable(job) == world_size:
                break
            time.sleep(0.02)
        time.sleep(0.02 * chance.random())
        for pid in chance.sample(ranks, world_size):
            os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            torchrec_nursery.ask("wait", pid, WAIT_SECONDS)
        steps = max(notes(job, 0))
        for mode in ("partial", "full") if options == "points" else ("partial",):
            copy = tmp_path / f"copy-{next(numbers)}"
            shutil.copytree(job, copy, ignore=shutil.ignore_patterns("meeting*", "notes*"))
            (copy / "given.json").write_text(json.dumps({"mode": mode, "options": options}))
            require_own_rows(recovered(torchrec_nursery, copy, world_size), job, steps, mode)


def num_durable(job):
    """How many ranks have a durable snapshot."""
    manifests = (read_manifest(path.parent) for path in job.glob("**/MANIFEST.json"))
    return sum(manifest is not None and bool(manifest.dense) for manifest in manifests)


def notes(job, rank):
    """Rows by table and id, at each step as it was trained last."""
    known = {}
    if (path := job / f"notes-{rank}").exists():
        with path.open("rb") as stream:
            while True:
                try:
                    step, rows = pickle.load(stream)
                except (EOFError, pickle.UnpicklingError):
                    break
                known[step] = rows
    return known


def recovered(nursery, copy, world_size):
    ranks = [
        nursery.ask("call", JOB, "recover", str(copy), rank, world_size)
        for rank in range(world_size)
    ]
    assert [nursery.ask("wait", pid, WAIT_SECONDS) for pid in ranks] == [0] * world_size
    return [pickle.loads((copy / f"found-{rank}").read_bytes()) for rank in range(world_size)]


def require_own_rows(results, job, steps, mode):
    for rank, found in enumerate(results):
        known = notes(job, rank)
        assert "error" not in found, found["error"]
        assert found["others"] == 0
        assert 0 < found["step"] <= steps + 1
        rows = found["rows"]
        if mode == "full":
            assert found["stale"] == 0
            assert rows == known[found["step"]]
        past = [then for step, then in known.items() if step <= found["step"]]
        assert any(rows.keys() == then.keys() for then in past)
        assert [key for key, row in rows.items() if all(t.get(key) != row for t in past)] == []
