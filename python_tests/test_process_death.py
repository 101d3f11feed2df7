"""``kill -9`` at any moment: the next run continues from a committed state."""

import json

import pytest

from python_tests.helpers import run_python

CODE = """
import sys
from pathlib import Path
from python_tests import killed_trainer
killed_trainer.main(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.long)])
def test_trainers_killed_at_random_moments_leave_stores_that_continue(tmp_path, kills):
    told = json.loads(run_python(CODE, tmp_path, kills, timeout_seconds=14 * kills))
    assert told["kills"] >= kills
    # The kills hit training, not only the start of it.
    assert told["before_first_step"] < told["kills"] / 2
    assert sum(durable > 0 for durable in told["durable"]) > told["stores"] / 2
