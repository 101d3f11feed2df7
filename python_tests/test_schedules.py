"""When a snapshot is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import EverySeconds, EverySteps
from cpr_ext.errors import UsageError
from cpr_ext.schedules import Progress

progresses = st.builds(Progress, st.integers(0, 100), st.floats(0, 100))


@given(st.integers(1, 100), progresses)
def test_every_steps_is_due_after_so_many_steps_whatever_the_time(steps, progress):
    assert EverySteps(steps).is_due(progress) == (progress.steps >= steps)


@given(st.floats(0.001, 100), progresses)
def test_every_seconds_is_due_after_so_much_time_whatever_the_steps(seconds, progress):
    assert EverySeconds(seconds).is_due(progress) == (progress.seconds >= seconds)


@given(st.integers(1, 100), st.floats(0.001, 100), st.integers(1, 100), progresses)
def test_a_combination_is_due_as_soon_as_one_of_its_parts_is(steps, seconds, other, progress):
    parts = [EverySteps(steps), EverySeconds(seconds), EverySteps(other)]
    combined = parts[0] | parts[1] | parts[2]
    assert combined.is_due(progress) == any(part.is_due(progress) for part in parts)


@pytest.mark.parametrize("steps", [0, -1])
def test_an_interval_of_no_steps_is_refused(steps):
    with pytest.raises(UsageError, match=rf"EverySteps\({steps}\): .* at least 1 step"):
        EverySteps(steps)


@pytest.mark.parametrize("seconds", [0, -0.5, float("nan")])
def test_an_interval_of_no_time_is_refused(seconds):
    with pytest.raises(UsageError, match=rf"EverySeconds\({seconds}\): .* positive"):
        EverySeconds(seconds)


def test_schedules_are_values():
    assert EverySteps(3) | EverySeconds(2) == EverySteps(3) | EverySeconds(2)
    assert EverySteps(3) != EverySteps(4)
