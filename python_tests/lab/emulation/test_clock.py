import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.lab.emulation.clock import EmulatedClock

clocks = st.builds(
    EmulatedClock,
    job_hours=st.floats(0.5, 5000),
    total_samples=st.integers(1, 1_000_000),
    samples_per_step=st.integers(1, 4096),
)


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


def test_the_ends_of_the_job_are_its_first_and_last_step() -> None:
    clock = EmulatedClock(10, total_samples=105, samples_per_step=10)
    assert clock.total_steps == 11  # the last has 5 samples
    assert clock.step_at(0) == 1
    assert clock.step_at(10) == 10  # of whole steps, the tenth ends nearest
    assert clock.interval_steps(float("inf")) == 11


@given(clock=clocks, share=st.floats(0, 1))
def test_a_step_is_the_nearest_to_its_hour(clock: EmulatedClock, share: float) -> None:
    hour = share * clock.job_hours
    step = clock.step_at(hour)

    def distance(candidate: int) -> float:
        return abs(candidate * clock.hours_per_step - hour)

    near = [n for n in (step - 1, step + 1) if 1 <= n <= clock.total_steps]
    assert 1 <= step <= clock.total_steps
    assert all(distance(step) <= distance(n) + 1e-9 * clock.job_hours for n in near)


@given(clock=clocks, first=st.integers(0, 10**6), second=st.integers(0, 10**6))
def test_hours_grow_with_samples_up_to_the_job(
    clock: EmulatedClock, first: int, second: int
) -> None:
    low, high = sorted((first % (clock.total_samples + 1), second % (clock.total_samples + 1)))
    assert clock.hours(0) == 0
    assert clock.hours(clock.total_samples) == pytest.approx(clock.job_hours)
    assert clock.hours(low) <= clock.hours(high)


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
