import pytest

from cpr_ext.errors import UsageError
from cpr_ext.wings.lab.emulation.run_strategy import EmulatedClock


def test_a_job_of_56_hours_in_1000_steps() -> None:
    clock = EmulatedClock(56, total_samples=128_000, samples_per_step=128)
    assert clock.total_steps == 1000
    assert clock.hours(64_000) == 28
    assert clock.hours_per_step == pytest.approx(0.056)
    assert clock.step_at(28) == 500
    assert clock.step_at(28.02) == 500
    assert clock.step_at(28.03) == 501
    assert clock.interval_steps(44.8) == 800
    assert clock.interval_steps(0.125 * 44.8) == 100


def test_what_a_run_cannot_show_is_refused_with_the_remedy() -> None:
    clock = EmulatedClock(50, total_samples=1000, samples_per_step=100)
    with pytest.raises(UsageError, match=r"one training step stands for 5 h.*more steps"):
        clock.interval_steps(2)
    with pytest.raises(UsageError, match="must be positive"):
        clock.interval_steps(0)
    with pytest.raises(UsageError, match="not within the job"):
        clock.step_at(50.1)


@pytest.mark.parametrize("bad", [(0, 10, 1), (float("nan"), 10, 1), (5, 0, 1), (5, 10, 0)])
def test_a_clock_needs_hours_and_samples(bad: tuple[float, int, int]) -> None:
    with pytest.raises(UsageError):
        EmulatedClock(*bad)
