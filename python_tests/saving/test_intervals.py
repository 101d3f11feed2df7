"""When a snapshot is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import EverySeconds, EverySteps, StoreOptions
from cpr_ext.errors import UsageError
from cpr_ext.saving.schedules import Continuous, Progress
from python_tests.helpers import Trained

progresses = st.builds(Progress, st.integers(0, 100), st.floats(0, 100))


@given(st.integers(1, 100), st.floats(0.001, 100), st.integers(1, 100), progresses)
def test_a_combination_is_due_as_soon_as_one_of_its_parts_is(steps, seconds, other, progress):
    parts = [EverySteps(steps), EverySeconds(seconds), EverySteps(other)]
    combined = parts[0] | parts[1] | parts[2]
    due = progress.steps >= min(steps, other) or progress.seconds >= seconds
    assert combined.is_due(progress) == any(part.is_due(progress) for part in parts) == due


@given(st.floats(1.0, 1e9), st.integers(0, 10**9), st.floats(0, 1e4), st.floats(0, 10))
def test_continuous_is_due_when_the_last_snapshot_has_had_its_share_of_the_bandwidth(
    rate, snapshot_bytes, seconds, min_seconds
):
    progress = Progress(7, seconds, snapshot_bytes)
    due = Continuous(rate, min_seconds).is_due(progress)
    assert due == (seconds >= min_seconds and seconds >= snapshot_bytes / rate)
    assert Continuous(min_seconds=min_seconds).is_due(progress) == (seconds >= min_seconds)


def test_snapshots_follow_each_other_and_keep_to_the_bandwidth(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = Trained(tmp_path, schedule=Continuous(1000.0, min_seconds=0.0), store=StoreOptions(None))
    begun = []
    for _ in range(200):
        now[0] += 1.0
        run.train(1)
        run.checkpointer.wait()
        begun.append(run.checkpointer.metrics.base_snapshots
                     + run.checkpointer.metrics.partial_snapshots)  # fmt: skip
    assert begun[0] == 1  # the base, at once
    written = run.checkpointer.metrics.bytes_written
    assert 3 <= begun[-1] <= 200
    assert written <= 1000.0 * 200 + 2 * run.checkpointer._saver.outcomes.last_bytes
    run.checkpointer.close()


def test_an_interval_of_no_time_and_no_bandwidth_are_refused():
    for seconds in (0, -0.5, float("nan")):
        with pytest.raises(UsageError, match=rf"EverySeconds\({seconds}\): .* positive"):
            EverySeconds(seconds)
    for options in ({"max_bytes_per_second": 0}, {"min_seconds": -1.0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Continuous(**options)
