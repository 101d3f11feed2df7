import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.csrc import reference


def make(num_rows=1000, **options):
    return _C.RowSampler(**{"name": "t", "num_rows": num_rows, "capacity": 10, **options})


def sampled_rows(sampler):
    return sampler.select(0, sampler.num_rows, sampler.num_rows).tolist()


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -1}, {"period": 0}])
def test_a_sample_without_room_or_period_is_refused(options):
    with pytest.raises(UsageError, match=f"'t': {next(iter(options))} is"):
        make(**options)


def test_period_one_samples_every_row_while_there_is_room():
    sampler = make(period=1)
    sampler.observe(np.array([5, 3, 5, 900]))
    assert sampled_rows(sampler) == [3, 5, 900]


def test_the_period_runs_on_from_one_batch_to_the_next():
    sampler = make(period=3, capacity=100)
    for first in range(0, 100, 7):
        sampler.observe(np.arange(first, min(100, first + 7)))
    assert sampled_rows(sampler) == list(range(2, 100, 3))
    assert sampler.num_dirty() == 100


def test_the_sample_never_outgrows_its_capacity():
    sampler = make(period=1, capacity=10)
    sampler.observe(np.arange(1000))
    assert sampler.num_sampled == 10
    assert len(sampled_rows(sampler)) == 10
    assert sampler.num_dirty() == 1000


def test_a_capacity_above_the_table_is_the_table():
    assert make(num_rows=7, capacity=100).capacity == 7


def test_the_same_seed_gives_the_same_sample_and_another_seed_another():
    def sample(seed):
        sampler = make(period=1, seed=seed)
        sampler.observe(np.arange(1000))
        return sampled_rows(sampler)

    assert sample(1) == sample(1) != sample(2)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.sampled_from([1, 64, 1000, 70_000]),
    share=st.sampled_from([0.001, 0.125, 1.0]),
    period=st.sampled_from([1, 2, 7, 2048]),
    seed=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_the_sample_is_the_references(num_rows, share, period, seed, dtype):
    options = {"capacity": max(1, int(share * num_rows)), "period": period, "seed": seed}
    options["capacity"] = min(options["capacity"], 200)  # the reference searches a list
    native = _C.RowSampler(name="t", num_rows=num_rows, **options)
    model = reference.RowSampler(num_rows, **options)
    random = np.random.default_rng(seed)
    for _ in range(3):
        indices = random.integers(0, num_rows, random.integers(0, 1000)).astype(dtype)
        native.observe(indices)
        model.observe(indices.tolist())
        assert sampled_rows(native) == sorted(model.sample)
        k = len(model.sample) // 2
        assert native.select(0, num_rows, k).tolist() == model.select(0, num_rows, k)


def test_no_row_is_favoured_where_the_budget_is_short():
    """200 sampled rows, 20 chosen, 500 times: each row comes out about 50 times."""
    sampler = make(num_rows=200, capacity=200, period=1)
    chosen = np.zeros(200)
    for _ in range(500):
        sampler.observe(np.arange(200))
        chosen[sampler.select(0, 200, 20)] += 1
    assert chosen.sum() == 500 * 20
    assert 20 < chosen.min() <= chosen.max() < 85


def test_frequent_rows_are_found_in_the_sample():
    random = np.random.default_rng(0)
    sampler = make(num_rows=100_000, capacity=100, period=2)
    hot = np.arange(50) * 1000 + 7
    for _ in range(20):
        batch = np.concatenate([np.repeat(hot, 40), random.integers(0, 100_000, 200)])
        sampler.observe(random.permutation(batch))
    assert len(set(sampled_rows(sampler)) & set(hot.tolist())) > 40
