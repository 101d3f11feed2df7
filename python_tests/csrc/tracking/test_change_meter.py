import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import NanError, UsageError
from python_tests.csrc import reference
from python_tests.examples import examples

DTYPES = [np.float16, np.float32, np.float64]


def make(weight, name="t"):
    return _C.ChangeMeter(name=name, weight=weight)


@examples(60)
@given(
    num_rows=st.sampled_from([1, 64, 65, 5000]),
    embedding_dim=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_the_rows_that_moved_most_are_selected(num_rows, embedding_dim, dtype, padding, seed):
    """Distances are a factor of 1.5 apart, so that rounding cannot change their order."""
    random = np.random.default_rng(seed)
    wide = random.standard_normal((num_rows, embedding_dim + padding)).astype(dtype)
    weight = wide[:, :embedding_dim]
    meter = make(weight)
    dirty = np.unique(random.integers(0, num_rows, min(num_rows, 20)))
    rank = random.permutation(len(dirty))
    weight[dirty, random.integers(0, embedding_dim, len(dirty))] += (1.5**rank).astype(dtype)
    meter.observe(dirty)
    k = len(dirty) // 3 + 1
    expected = np.sort(dirty[np.argsort(-rank)[:k]])
    np.testing.assert_array_equal(meter.select(0, num_rows, k, weight=weight), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_rows_that_were_looked_up_are_measured(dtype):
    weight = np.zeros((10, 3), dtype=dtype)
    meter = make(weight)
    weight[4] = 100
    meter.observe(np.array([2]))
    weight[2] = 1
    assert meter.select(0, 10, 5, weight=weight).tolist() == [2]


def test_a_dirty_row_that_has_not_moved_comes_last():
    weight = np.zeros((10, 3), dtype=np.float32)
    meter = make(weight)
    meter.observe(np.array([1, 2, 3]))
    weight[3] = 1e-18
    assert meter.select(0, 10, 1, weight=weight).tolist() == [3]
    assert meter.select(0, 10, 2, weight=weight).tolist() == [1, 3]
    assert meter.select(0, 10, 9, weight=weight).tolist() == [1, 2, 3]


def test_change_is_measured_from_when_the_row_was_last_taken():
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = make(weight)
    weight[0], weight[1] = 10, 1
    meter.observe(np.array([0, 1]))
    meter.take(np.array([0]), weight=weight)
    weight[0] += 0.5
    meter.observe(np.array([0]))
    assert meter.select(0, 4, 1, weight=weight).tolist() == [1]


def test_a_failed_save_gives_a_row_its_priority_back():
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = make(weight)
    weight[0], weight[1] = 10, 1
    meter.observe(np.array([0, 1]))
    taken = meter.take_range(0, 4, weight=weight)
    meter.observe(np.array([2]))
    weight[2] = 5
    meter.put_back(taken)
    assert meter.select(0, 4, 1, weight=weight).tolist() == [0]
    assert meter.select(0, 4, 2, weight=weight).tolist() == [0, 2]
    meter.take_range(0, 4, weight=weight)
    meter.observe(np.array([0, 1]))
    weight[1] += 0.1
    assert meter.select(0, 4, 1, weight=weight).tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("embedding_dim", [1, 8, 19])
def test_nan_in_a_dirty_row_is_named_and_nothing_changes(dtype, embedding_dim):
    weight = np.zeros((6000, embedding_dim), dtype=dtype)
    meter = make(weight, name="users")
    meter.observe(np.arange(5000))
    weight[[4000, 4800], -1] = np.nan
    weight[5500] = np.nan  # not dirty: not looked at
    pool = _C.ThreadPool(num_threads=3)
    for call in (
        lambda: meter.select(0, 6000, 10, weight=weight, pool=pool),
        lambda: meter.take_range(0, 6000, weight=weight, pool=pool),
        lambda: meter.take(np.arange(6000), weight=weight, pool=pool),
    ):
        with pytest.raises(NanError, match="'users': row 4000"):
            call()
        assert meter.num_dirty() == 5000
    assert meter.take_range(0, 4000, weight=weight).num_rows == 4000
    assert meter.dirty_rows().tolist() == list(range(4000, 5000))


def test_infinities_are_changes_and_not_nan():
    weight = np.zeros((5, 9), dtype=np.float32)
    weight[0, 1] = weight[1, 1] = np.inf
    weight[2, 1] = np.nan
    meter = make(weight)
    weight[0, 2] = 3  # its infinity has not moved: a change of 3
    weight[1, 1] = -np.inf
    weight[2, 1] = 0  # a NaN that is gone: as far as it gets
    weight[3, 1] = 4
    meter.observe(np.arange(5))
    assert meter.select(0, 5, 2, weight=weight).tolist() == [1, 2]
    assert meter.select(0, 5, 3, weight=weight).tolist() == [1, 2, 3]
    assert meter.select(0, 5, 4, weight=weight).tolist() == [0, 1, 2, 3]


def test_every_half_precision_number_is_read_as_numpy_reads_it():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].reshape(-1, 1)
    meter = make(np.zeros_like(halves))
    meter.observe(np.arange(len(halves)))
    sizes = np.abs(halves[:, 0].astype(np.float32))
    ranking = reference.Ranking(sizes)
    for k in (1, 1000, 30_000, 60_000):
        expected = ranking.top(k)
        np.testing.assert_array_equal(meter.select(0, len(halves), k, weight=halves), expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_number_of_threads_changes_nothing(threads):
    random = np.random.default_rng(1)
    weight = random.standard_normal((20_000, 7)).astype(np.float32)
    meters = make(weight), make(weight)
    weight += random.standard_normal(weight.shape).astype(np.float32)
    pools = None, _C.ThreadPool(num_threads=threads)
    for meter in meters:
        meter.observe(np.arange(0, 20_000, 2))
    chosen = [
        m.select(5, 19_995, 3000, weight=weight, pool=p) for m, p in zip(meters, pools, strict=True)
    ]
    np.testing.assert_array_equal(*chosen)
    taken = [m.take(chosen[0], weight=weight, pool=p) for m, p in zip(meters, pools, strict=True)]
    np.testing.assert_array_equal(taken[0].row_ids, taken[1].row_ids)


def test_the_weight_is_required_and_must_be_the_same_table():
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = make(weight)
    with pytest.raises(UsageError, match=r"'t'.*pass weight="):
        meter.select(0, 4, 1)
    with pytest.raises(UsageError, match=r"'t'.*pass weight="):
        meter.take_range(0, 4)
    others = [weight[:3], weight.astype(np.float64), np.zeros((4, 3), np.float32)]
    for other in others:
        with pytest.raises(UsageError, match=r"'t'.*\(4, 2\)"):
            meter.select(0, 4, 1, weight=other)


@pytest.mark.parametrize(
    "weight",
    [
        np.zeros(4, np.float32),
        np.zeros((4, 2), np.int64),
        np.zeros((2, 4), np.float32).T,
        np.zeros((4, 4), np.float32)[:, ::2],
        np.zeros((4, 4), np.float32)[::-1],
        np.zeros((4, 0), np.float32),
        np.zeros((0, 4), np.float32),
    ],
)
def test_a_weight_that_is_no_table_of_floating_rows_is_refused(weight):
    with pytest.raises(UsageError, match="'t'"):
        make(weight)


def test_it_keeps_one_more_copy_of_the_weight():
    weight = np.zeros((1000, 16), dtype=np.float16)
    assert weight.nbytes <= make(weight).memory_bytes() <= weight.nbytes + 1000 // 8 + 8
