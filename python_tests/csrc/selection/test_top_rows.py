"""csrc/selection/top_rows.h, cuda/top_rows.h: the best rows under a budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import UsageError
from python_tests.csrc import backends, reference
from python_tests.examples import examples

pytestmark = pytest.mark.usefixtures("every_instruction_set")

POOLS = [None] + [_C.ThreadPool(num_threads=threads) for threads in (1, 3)]
FLOATS = st.floats(0, width=32, allow_subnormal=True)
COUNTS = st.one_of(st.integers(0, 3), st.integers(2040, 2056), st.integers(0, 2**32 - 1))


@pytest.fixture(scope="module", params=backends.NAMES)
def top_rows(request):
    """Of counts, by a backend."""
    found = backends.find(request.param)
    if found.device is None:
        return lambda scores, k: _C.top_rows(scores, k).tolist()
    select, device = found.native.device_top_rows, found.device
    return lambda scores, k: select(found.put(scores), k, device=device).tolist()


@examples(200)
@given(scores=st.lists(COUNTS, max_size=60), k=st.integers(-1, 61))
def test_counts_are_ranked_as_a_sort_ranks_them(top_rows, scores, k):
    assert top_rows(np.array(scores, dtype=np.uint32), k) == reference.top_rows(scores, k)


@examples(300)
@given(scores=st.lists(FLOATS, max_size=60), k=st.integers(-1, 61))
def test_floats_are_ranked_as_a_sort_ranks_them(scores, k):
    found = _C.top_rows(torch.tensor(scores, dtype=torch.float32), k)
    assert found.dtype == np.int64
    assert found.tolist() == reference.top_rows(scores, k)


KINDS = {
    "few_small_counts": lambda random, n: random.poisson(0.1, n).astype(np.uint32),
    "small_counts": lambda random, n: random.poisson(3, n).astype(np.uint32),
    "counts_around_the_bins": lambda random, n: random.integers(2040, 2056, n, np.uint32),
    "counts_around_65536": lambda random, n: random.integers(65_000, 66_000, n, np.uint32),
    "large_counts": lambda random, n: random.integers(0, 2**32, n, np.uint32),
    "equal_counts": lambda random, n: np.full(n, 7, np.uint32),
    "highest_counts": lambda random, n: np.full(n, 2**32 - 1, np.uint32),
    "zeros": lambda random, n: np.zeros(n, np.uint32),
    "floats": lambda random, n: random.random(n, np.float32),
    "floats_of_all_sizes": lambda random, n: np.exp2(random.uniform(-149, 127, n)).astype("f4"),
    "near_floats": lambda random, n: (1 + random.integers(0, 9, n) * 2.0**-23).astype(np.float32),
    "equal_floats": lambda random, n: np.full(n, 0.5, np.float32),
    "mostly_zero_floats": lambda random, n: (random.poisson(0.1, n) / 8).astype(np.float32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 1023, 1024, 1025, 2048, 70_001, 300_000])
def test_every_size_budget_and_thread_count_gives_the_same_rows(kind, n):
    scores = KINDS[kind](np.random.default_rng(n), n)
    ranking = reference.Ranking(scores)
    for k in {0, 1, n // 8, n // 2, n - 1, n, n + 1}:
        expected = ranking.top(k)
        for pool in POOLS if n > 65_536 else POOLS[:2]:
            np.testing.assert_array_equal(_C.top_rows(scores, k, pool), expected)


SAMPLED = 600_000  # rows from which on a sample of large counts is drawn


def unlike_the_sample(factor):
    """The rows that a selection draws to learn where the threshold is have other scores."""

    def scores_of(random):
        scores = random.integers(10**6, 2 * 10**6, SAMPLED, np.uint32)
        numbers = np.arange(1, 16385, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        drawn = (reference.mix_bits(numbers) % np.uint64(SAMPLED)).astype(np.int64)
        scores[drawn] = factor * random.integers(3000, 4000, 16384, np.uint32)
        return scores

    return scores_of


LARGE = {
    "uniform": lambda random: random.integers(0, 2**32, SAMPLED, np.uint32),
    "around_the_lowest": lambda random: random.integers(2000, 2100, SAMPLED, np.uint32),
    "of_all_sizes": lambda random: np.exp2(random.uniform(0, 32, SAMPLED)).astype(np.uint32),
    "many_equal": lambda random: random.choice(np.array([0, 5000, 6000], np.uint32), SAMPLED),
    "few_large": lambda random: (
        random.integers(0, 9, SAMPLED, np.uint32)
        + 10**6 * (random.random(SAMPLED) < 0.1).astype(np.uint32)
    ),
    "highest": lambda random: np.uint32(2**32 - 1) - random.integers(0, 9, SAMPLED, np.uint32),
    "of_which_a_sample_is_too_low": unlike_the_sample(1),
    "of_which_a_sample_is_too_high": unlike_the_sample(1000),
}


@pytest.mark.parametrize("kind", LARGE)
def test_many_large_counts_give_the_same_rows(kind):
    scores = LARGE[kind](np.random.default_rng(7))
    ranking = reference.Ranking(scores)
    for share in (1e-5, 0.01, 0.1, 0.125, 0.5, 0.9, 0.9999, 1):
        k = int(SAMPLED * share)
        np.testing.assert_array_equal(_C.top_rows(scores, k, POOLS[2]), ranking.top(k))


@pytest.mark.parametrize("flushes", [False, True])
def test_infinity_ranks_first_minus_zero_is_zero_and_subnormals_count(flushes):
    """Also where a thread takes them for zero."""
    scores = np.array([1, np.inf, -0.0, 3e38, 0, 1e-45], dtype=np.float32)
    torch.set_flush_denormal(flushes)
    try:
        for k, expected in ((1, [1]), (2, [1, 3]), (6, [0, 1, 3, 5])):
            assert _C.top_rows(scores, k).tolist() == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, -1.0, -np.inf, -1e-45])
@pytest.mark.parametrize("pool", POOLS)
def test_a_score_that_is_nan_or_negative_is_named(bad, pool):
    scores = np.ones(300_000, dtype=np.float32)
    scores[[200_000, 250_000]] = bad
    with pytest.raises(UsageError, match=r"row 200000 is -?(nan|[0-9]|inf)"):
        _C.top_rows(scores, 5, pool)


def test_what_is_no_array_of_scores_is_refused_and_none_give_no_rows():
    for scores, message in [
        (np.zeros(3, np.float64), "float64.*float32"),
        (np.zeros((3, 1), np.float32), "2 dimensions"),
        (np.zeros(6, np.float32)[::2], "contiguous"),
        ([1.0], "list"),
    ]:
        with pytest.raises(UsageError, match=message):
            _C.top_rows(scores, 1)
    assert _C.top_rows(np.zeros(0, np.float32), 5).tolist() == []


COUNT_KINDS = [kind for kind in KINDS if "float" not in kind]


@pytest.mark.parametrize("kind", COUNT_KINDS)
@pytest.mark.parametrize("n", [1, 4, 5, 1024, 1025, 16_384, 16_385, 70_001])
def test_a_device_chooses_the_same_rows_at_every_size_and_budget(top_rows, kind, n):
    scores = KINDS[kind](np.random.default_rng(n), n)
    ranking = reference.Ranking(scores)
    for k in {0, 1, n // 8, n - 1, n, n + 1}:
        assert top_rows(scores, k) == ranking.top(k).tolist()


@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_a_device_loads_four_scores_at_once_from_any_address(emulated, begin):
    scores = np.random.default_rng(0).poisson(2, 5004).astype(np.uint32)[begin:][:5000]
    before = emulated.native.emulator.wide_loads()
    found = emulated.native.device_top_rows(scores, 700, device=0)
    np.testing.assert_array_equal(found, reference.Ranking(scores).top(700))
    loads = emulated.native.emulator.wide_loads() - before
    assert loads >= 2 * (5000 // 4 - 2)  # counted, then written
