import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.csrc import backends, reference
from python_tests.examples import examples


def make(num_rows=1000, **options):
    return _C.RowSampler(**{"name": "t", "num_rows": num_rows, "capacity": 10, **options})


def sampled_rows(sampler):
    return sampler.select(0, sampler.num_rows, sampler.num_sampled).tolist()


@pytest.mark.parametrize("options", [{"capacity": 0}, {"capacity": -1}, {"period": 0}])
def test_a_sample_without_room_or_period_is_refused(options):
    with pytest.raises(UsageError, match=f"'t': {next(iter(options))} is"):
        make(**options)


def test_period_one_samples_every_row_while_there_is_room():
    sampler = make(period=1)
    sampler.observe(np.array([5, 3, 5, 900]))
    assert sampled_rows(sampler) == [3, 5, 900]


def sampled_numbers(num_lookups, batch_size, period, backend="cpu", seed=0):
    """Which of so many lookups are sampled: each looks up a row of its own."""
    sampler = backends.find(backend).row_sampler(
        "t", num_lookups, capacity=num_lookups, period=period, seed=seed
    )
    for first in range(0, num_lookups, batch_size):
        sampler.observe(np.arange(first, min(num_lookups, first + batch_size)))
    assert sampler.num_dirty() == num_lookups
    return np.array(sampled_rows(sampler), dtype=np.int64)


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("period", [1, 2, 3, 7, 64, 1000])
def test_of_every_period_of_lookups_one_is_sampled_however_they_come_in_batches(backend, period):
    num_lookups = 30 * period if period < 100 else 3 * period
    numbers = sampled_numbers(num_lookups, 7 if num_lookups < 500 else 77, period, backend)
    assert (numbers // period).tolist() == list(range(num_lookups // period))
    for batch_size in (1 if num_lookups < 500 else 501, period, num_lookups):
        again = sampled_numbers(num_lookups, batch_size, period, backend)
        assert again.tolist() == numbers.tolist()


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("period", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bag", [2, 3, 4, 6, 8, 64])
def test_every_column_of_a_bag_is_sampled_at_its_share(backend, period, bag):
    """Chi-squared over the columns; by a place for good, some would never be sampled."""
    share = 640  # lookups sampled of a column, in 20 independent draws or more
    numbers = sampled_numbers(share * period * bag, 100 * bag, period, backend, seed=period)
    columns = np.bincount(numbers % bag, minlength=bag)
    assert columns.sum() == share * bag
    statistic = ((columns - share) ** 2 / share).sum() / 32  # the same draw serves 32 lookups
    assert statistic < bag - 1 + 4 * np.sqrt(2 * bag), columns


def test_the_places_drawn_are_independent_of_each_other():
    places = (sampled_numbers(256_000, 256_000, 2) % 2).reshape(-1, 32)
    assert (places == places[:, :1]).all()
    places = places[:, 0]
    for lag in (1, 2, 3, 4, 8, 16):
        pairs = np.bincount(2 * places[lag:] + places[:-lag], minlength=4)
        assert (abs(pairs - 1000) < 5 * np.sqrt(750)).all(), (lag, pairs)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_a_period_beyond_all_lookups_is_one(backend):
    assert len(sampled_numbers(1000, 300, 2**63 - 1, backend)) <= 1


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


@examples(40)
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
        for k in (len(model.sample) // 2, len(model.sample), 2 * len(model.sample), num_rows):
            assert native.select(0, num_rows, k).tolist() == model.select(0, num_rows, k)


@pytest.mark.parametrize("backend", backends.NAMES)
@pytest.mark.parametrize("num_dirty", [1, 1000, 70_000])
def test_what_the_sample_leaves_of_the_budget_is_filled_with_other_dirty_rows(backend, num_dirty):
    sampler = backends.find(backend).row_sampler("t", 70_000, capacity=50, period=2**40)
    random = np.random.default_rng(num_dirty)
    rows = np.sort(random.permutation(70_000)[:num_dirty])
    sampler.observe(rows)
    model = reference.RowSampler(70_000, 50, 2**40, 0)
    model.observe(rows.tolist())
    for k in (1, 39, 41, 500, num_dirty - 1, num_dirty, 70_000):
        chosen = sampler.select(0, 70_000, k).tolist()
        assert len(chosen) == min(k, num_dirty)
        assert chosen == model.select(0, 70_000, k)
    assert sampler.select(100, 50_000, 70_000).tolist() == model.dirty_rows(100, 50_000)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_sampled_rows_come_before_those_that_fill_the_budget(backend):
    sampler = backends.find(backend).row_sampler("t", 10_000, capacity=500, period=64)
    sampler.observe(np.arange(10_000))
    sampled = sampled_rows(sampler)
    assert 140 < len(sampled) < 170
    chosen = sampler.select(0, 10_000, 500).tolist()
    assert len(chosen) == 500
    assert set(sampled) < set(chosen)
    sampler.take(np.array(chosen))
    assert sampler.num_sampled == 0
    assert not set(sampler.select(0, 10_000, 500).tolist()) & set(chosen)


@pytest.mark.parametrize("backend", backends.NAMES)
def test_no_row_is_favoured_among_those_that_fill_the_budget(backend):
    """200 dirty rows, 20 chosen, 500 times: each row comes out about 50 times."""
    sampler = backends.find(backend).row_sampler("t", 200, capacity=200, period=2**40)
    chosen = np.zeros(200)
    for _ in range(500):
        sampler.observe(np.arange(200))
        chosen[sampler.select(0, 200, 20)] += 1
    assert chosen.sum() == 500 * 20
    assert 20 < chosen.min() <= chosen.max() < 85


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
