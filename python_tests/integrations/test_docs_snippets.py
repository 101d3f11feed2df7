"""Snippets of the docs under torchrun itself: a rank dies in a commit, and all start again."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("torchrec.md", "distributed.md")
PARTS, DEATHS = 10, 5


def run_under_torchrun(page, directory, deaths):
    """The lives of a job that ends well in the end; no life has ranks at different steps."""
    command = [
        Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(len(deaths)), "-m", "python_tests.integrations.docs_snippet",
        page, str(directory), json.dumps(deaths),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        # Else ranks that start again may find the addresses of the dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-5000:]
    steps = []
    for life in range(len(deaths) + 1):
        first, second = (
            json.loads((directory / f"{rank}-{life}.json").read_text()) for rank in range(2)
        )
        assert first == second, f"life {life}"
        assert first["step"] == first["counted"]
        steps.append(first["step"])
    assert steps == sorted(steps)
    assert not (directory / f"0-{len(deaths) + 1}.json").exists()
    return steps


def some_deaths(number):
    chance = random.Random()
    deaths = [(chance.randrange(2), chance.randrange(6)) for _ in range(number)]
    print(deaths)
    return deaths


@pytest.mark.parametrize("page", PAGES)
def test_a_death_in_a_commit_leaves_no_two_ranks_at_different_steps(tmp_path, page):
    assert run_under_torchrun(page, tmp_path, [(1, 5)])[-1] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("page", PAGES)
def test_fifty_deaths_in_commits_leave_no_two_ranks_at_different_steps(tmp_path, page, part):
    run_under_torchrun(page, tmp_path, some_deaths(DEATHS))
