"""csrc/tracking/change_meter.h, cuda/change_meter.h: how far rows moved since they were taken."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext import _C
from cpr_ext.errors import CudaError, NanError, UsageError
from python_tests.csrc import backends, reference
from python_tests.csrc.backends import live_bytes
from python_tests.examples import examples

DTYPES = [np.float16, np.float32, np.float64]


def make(weight, name="t"):
    return _C.ChangeMeter(name=name, weight=weight)


def test_what_a_failed_save_gave_back_is_added_to_what_a_row_moves_from_then_on(backend):
    weight = np.zeros((4, 1), dtype=np.float32)
    meter = backend.change_meter("t", weight)
    meter.observe(np.array([1, 2]))
    weight[1], weight[2] = 3, 4
    taken = meter.take(np.array([1]), weight=weight)
    meter.put_back(taken)
    weight[1] = 1  # 3 and 2
    assert meter.select(0, 4, 1, weight=weight).tolist() == [1]


def test_infinities_are_changes_and_not_nan(backend):
    weight = np.zeros((5, 9), dtype=np.float32)
    weight[0, 1] = weight[1, 1] = np.inf
    weight[2, 1] = np.nan
    meter = backend.change_meter("t", weight)
    weight[0, 2] = 3  # its infinity has not moved: a change of 3
    weight[1, 1] = -np.inf
    weight[2, 1] = 0  # a NaN that is gone: as far as it gets
    weight[3, 1] = 4
    meter.observe(np.arange(5))
    assert meter.select(0, 5, 2, weight=weight).tolist() == [1, 2]
    assert meter.select(0, 5, 3, weight=weight).tolist() == [1, 2, 3]
    assert meter.select(0, 5, 4, weight=weight).tolist() == [0, 1, 2, 3]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("embedding_dim", [1, 8, 19])
def test_nan_is_told_when_rows_are_read_and_nothing_of_its_row_is_lost(
    device, dtype, embedding_dim
):
    weight = np.zeros((600, embedding_dim), dtype=dtype)
    meter = device.change_meter("users", weight)
    meter.observe(np.arange(500))
    weight[:500] = 1
    weight[[400, 480], -1] = np.nan
    weight[550] = np.nan  # not dirty: not looked at
    pending = meter.begin_select(0, 600, 10, weight=weight)
    with pytest.raises(NanError, match="'users': row 400 holds NaN"):
        pending.read()
    taken = meter.take_range(0, 600, weight=weight)
    assert taken.num_rows == 498
    assert meter.dirty_rows().tolist() == [400, 480]
    assert meter.take(np.array([3, 400]), weight=weight).num_rows == 0
    weight[[400, 480], -1] = 3  # farther from 0, where they were last taken, than the others
    assert meter.select(0, 600, 5, weight=weight).tolist() == [400, 480]
    meter.observe(np.array([100]))
    weight[100] = 1000  # farther than they, whose change is no infinite one
    assert meter.select(0, 600, 1, weight=weight).tolist() == [100]
    weight[100] = 1
    meter.put_back(taken)
    assert meter.num_dirty() == 500
    assert meter.select(0, 600, 2, weight=weight).tolist() == [400, 480]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_change_is_measured_in_every_floating_dtype(dtype):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(300, 9).to(dtype), requires_grad=False)
    meter = _C.ChangeMeter(name="t", weight=weight)
    before = weight.clone()
    weight += torch.randn(300, 9).to(dtype)
    meter.observe(torch.arange(0, 300, 2))
    wide = torch.float64
    changes = (weight.to(wide) - before.to(wide)).norm(dim=1)[::2]
    expected = np.sort(2 * torch.topk(changes, 40).indices.numpy())
    np.testing.assert_array_equal(meter.select(0, 300, 40, weight=weight), expected)
    assert meter.take(torch.from_numpy(expected), weight=weight).num_rows == 40


@pytest.mark.parametrize("threads", [1, 3])
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


def test_the_weight_is_required_and_must_be_the_same_table(backend):
    weight = np.zeros((4, 2), dtype=np.float32)
    meter = backend.change_meter("t", weight)
    for call in (lambda: meter.select(0, 4, 1), lambda: meter.take_range(0, 4)):
        with pytest.raises(UsageError, match=r"'t'.*pass weight="):
            call()
    for other in (weight[:3], weight.astype(np.float64), np.zeros((4, 3), np.float32)):
        with pytest.raises(UsageError, match=r"'t'.*\(4, 2\)"):
            meter.select(0, 4, 1, weight=other)


def test_a_weight_that_is_no_table_of_floating_rows_is_refused():
    rows = np.zeros((4, 4), np.float32)
    shapes = [np.zeros(shape, np.float32) for shape in (4, (4, 0), (0, 4))]
    for weight in (*shapes, np.zeros((4, 2), np.int64), rows[:2].T, rows[:, ::2], rows[::-1]):
        with pytest.raises(UsageError, match="'t'"):
            make(weight)


# --- on a device ---


@pytest.mark.emulated
@examples(40)
@given(
    num_rows=st.sampled_from([1, 31, 33, 200]),
    embedding_dim=st.sampled_from([1, 2, 7, 8, 9, 16, 33, 64]),
    padding=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]),
    seed=st.integers(0, 10_000),
)
def test_every_change_is_the_hosts_bit_for_bit(
    num_rows, embedding_dim, padding, dtype, spread, seed
):
    """Every budget chooses the same rows, ties included, so all changes order the same."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((num_rows, embedding_dim + padding)).astype(dtype)
    weight = weight[:, :embedding_dim]
    meters = make(weight), backends.find("emulated").change_meter("t", weight)
    # Rows in pairs of nearly the same change: an order of summation of one's own would swap some.
    step = (random.standard_normal((num_rows, embedding_dim)) * spread).astype(dtype)
    step[1::2] = step[: len(step) // 2 * 2 : 2][:, ::-1]
    weight += step
    dirty = np.unique(random.integers(0, num_rows, num_rows))
    for meter in meters:
        meter.observe(dirty)
    for k in {1, 2, len(dirty) // 3, len(dirty) // 2, len(dirty) - 1}:
        chosen = [meter.select(0, num_rows, k, weight=weight).tolist() for meter in meters]
        assert chosen[0] == chosen[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_precision_number_is_read_as_on_the_host_which_reads_it_as_torch(
    emulated, dtype
):
    every = torch.arange(2**16).to(torch.uint16).view(getattr(torch, dtype))
    every = every[every.isfinite()].view(-1, 1)
    ranking = reference.Ranking(every[:, 0].abs().float().numpy())
    meters = make(0 * every), emulated.change_meter("t", 0 * every)
    for meter in meters:
        meter.observe(np.arange(len(every)))
    for k in (1, 1000, 30_000, 60_000):
        chosen = [meter.select(0, len(every), k, weight=every) for meter in meters]
        np.testing.assert_array_equal(*chosen)
        if dtype == "float16":  # squares of others may be 0 or infinite
            np.testing.assert_array_equal(chosen[0], ranking.top(k))


def test_the_weight_is_as_it_is_when_the_stream_gets_there(emulated):
    weight = np.zeros((8, 4), dtype=np.float32)
    meter = emulated.change_meter("t", weight)
    lookups = np.array([1, 2])
    emulated.native.emulator.set_lazy(True)
    meter.observe(lookups)
    bytes_ = emulated.native.emulator.submit_fill
    bytes_(weight[1].ctypes.data, 0x40, 16)  # an optimizer's step: row 1 is 3.0039
    before = meter.begin_select(0, 8, 1, weight=weight)
    taken = meter.take(np.array([1]), weight=weight)
    bytes_(weight[2].ctypes.data, 0x3F, 16)
    bytes_(weight[1].ctypes.data, 0x00, 16)
    lookups_later = np.array([1])
    meter.observe(lookups_later)
    asked = 0
    while not before.is_ready():
        asked += 1
    assert asked > 3
    assert before.read().tolist() == [1]
    assert taken.row_ids.tolist() == [1]
    assert meter.select(0, 8, 1, weight=weight).tolist() == [1], "it moved back by 3.0039"


def test_where_the_copy_finds_no_memory_its_size_and_the_remedy_are_told(emulated):
    weight = np.zeros((1000, 16), dtype=np.float16)
    before = live_bytes(emulated)
    emulated.native.emulator.calls()
    emulated.change_meter("t", weight)
    needed = emulated.native.emulator.calls()["cudaMalloc"]
    emulated.native.emulator.fail_call("cudaMalloc", needed)
    with pytest.raises(
        CudaError,
        match=r"'users': .* 1000 rows of 32 bytes, 32000 in all.*free so much.*out of memory",
    ):
        emulated.change_meter("users", weight)
    assert live_bytes(emulated) == before
