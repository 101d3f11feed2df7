"""Jobs with managed collisions are killed at random: no row returns under another id."""

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

from python_tests.distributed.losses import long
from python_tests.integrations.conftest import WAIT_SECONDS
from python_tests.integrations.managed_job import recovered, until_killed


@pytest.mark.parametrize("options", ["default", "points"])
@pytest.mark.parametrize(("world_size", "kills"), [(2, 2), *(long(n, 4) for n in (1, 3, 4))])
def test_a_killed_job_has_each_row_under_its_id(ranks, tmp_path, world_size, kills, options):
    chance, numbers = random.Random(), count()
    job, steps = tmp_path / "job", 0
    job.mkdir()
    for life in range(kills):
        pids = ranks.start(until_killed, job, world_size, life, options)
        wanted = steps + chance.randint(12, 30)
        deadline = time.monotonic() + WAIT_SECONDS
        # A busy disk may take longer than these steps for the first snapshot.
        while max(notes(job, 0), default=0) < wanted or num_durable(job) < world_size:
            assert time.monotonic() < deadline, ranks.logs(job)
            time.sleep(0.02)
        time.sleep(0.02 * chance.random())
        for pid in chance.sample(pids, world_size):
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            assert ranks.nursery.ask("wait", pid, WAIT_SECONDS) == -signal.SIGKILL
        steps = max(notes(job, 0))
        for mode in ("partial", "full") if options == "points" else ("partial",):
            copy = tmp_path / f"copy-{next(numbers)}"
            shutil.copytree(job, copy, ignore=shutil.ignore_patterns("notes*"))
            results = ranks.run(recovered, copy, world_size, mode, options)
            for rank, found in enumerate(results):
                require_own_rows(found, notes(job, rank), steps, mode)


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


def require_own_rows(found, known, steps, mode):
    assert found["others"] == 0
    assert 0 < found["step"] <= steps + 1
    rows = found["rows"]
    if mode == "full":
        assert found["stale"] == 0
        assert rows == known[found["step"]]
    past = [then for step, then in known.items() if step <= found["step"]]
    assert any(rows.keys() == then.keys() for then in past)
    assert [key for key, row in rows.items() if all(t.get(key) != row for t in past)] == []
