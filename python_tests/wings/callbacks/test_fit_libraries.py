"""Libraries with a fit() of their own, the real ones: killed in an epoch, equal in every bit.

``make test-recipes`` installs them, and sets CPR_EXT_RECIPES=required: then none is skipped.
"""

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(library, store, die_after=-1):
    """Train in a process of its own; returns where it began, and a digest of the end."""
    command = [sys.executable, "-m", "python_tests.wings.callbacks.fit_job"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, library, str(store), str(die_after)],
        cwd=store.parent,  # libraries write logs there
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    expected = -signal.SIGKILL if die_after > 0 else 0
    assert result.returncode == expected, result.stdout + result.stderr
    begun = re.search(r"begins at step (\d+) of epoch (\d+)", result.stdout)
    return (int(begun[1]), int(begun[2])), result.stdout.split()[-1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "kills"),
    [
        # batches until it dies, and where it begins again: in an epoch, and at its beginning
        ("torch_rechub", [(4, (1, 0)), (19, (16, 1))]),
        ("deepctr_torch", [(4, (1, 0)), (19, (16, 1))]),
        ("recbole", [(9, (6, 1)), (13, (11, 1))]),
    ],
)
def test_a_killed_fit_ends_bit_for_bit_as_one_that_was_not(tmp_path, library, kills):
    if os.environ.get("CPR_EXT_RECIPES") == "required":
        importlib.import_module(library)
    pytest.importorskip(library, reason=f"needs {library}: make test-recipes")
    begun, expected = run(library, tmp_path / "whole")
    assert begun == (0, 0)
    for die_after, begins_again in kills:
        store = tmp_path / str(die_after)
        run(library, store, die_after)
        assert run(library, store) == (begins_again, expected)
