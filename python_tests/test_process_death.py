"""``kill -9`` at any moment: the next run continues from a committed state."""

import json

from python_tests.helpers import run_python

CODE = """
import sys
from pathlib import Path
from python_tests import killed_trainer
killed_trainer.main(Path(sys.argv[1]), int(sys.argv[2]))
"""


def test_fifty_trainers_killed_at_random_moments_leave_stores_that_continue(tmp_path):
    told = json.loads(run_python(CODE, tmp_path, 50, timeout_seconds=280))
    assert told["kills"] >= 50
    # The kills hit training, not only the start of it.
    assert told["before_first_step"] < told["kills"] / 2
    assert sum(durable > 0 for durable in told["durable"]) > told["stores"] / 2
