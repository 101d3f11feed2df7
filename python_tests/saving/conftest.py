"""Runs that train in halves of a step."""

import pytest

import cpr_ext
from python_tests.saving.halves import Steps


@pytest.fixture
def run(tmp_path):
    run = Steps(tmp_path / "store")
    run.train(1)
    run.checkpointer.wait()
    run.train(2)
    yield run
    if not run.checkpointer._guard.is_closed:
        run.checkpointer._release()


@pytest.fixture
def slow_run(tmp_path):
    """A base is captured over several steps; the first of them is done."""
    staging = cpr_ext.StagingOptions(slot_bytes=64 << 10)
    run = Steps(tmp_path / "store", tables={"a": (20_000, 8)}, staging=staging)
    run.train(1)
    assert run.checkpointer._saver.in_flight.state == "capturing"
    yield run
    if not run.checkpointer._guard.is_closed:
        run.checkpointer._release()
