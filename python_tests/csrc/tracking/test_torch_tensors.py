"""The one file here that needs torch: tensors in place of numpy arrays."""

import numpy as np
import pytest

from cpr_ext import _C
from cpr_ext.errors import RowIndexError, UsageError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6, 1)])
def test_index_tensors_of_any_shape_are_counted(dtype, shape):
    counter = _C.AccessCounter(name="t", num_rows=5)
    indices = torch.tensor([0, 1, 1, 4, 4, 4], dtype=dtype).reshape(shape)
    _C.count_lookups([counter, counter], [indices, torch.tensor(2)])
    assert counter.counts().tolist() == [1, 2, 1, 0, 3]
    counter.observe(torch.empty(0, dtype=dtype))


def test_a_slice_of_a_tensor_is_read_from_its_own_start():
    counter = _C.AccessCounter(name="t", num_rows=100)
    counter.observe(torch.arange(100)[40:43])
    assert counter.dirty_rows().tolist() == [40, 41, 42]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(2), "torch.float32.*int64"),
        (torch.zeros(2, dtype=torch.int16), "torch.int16"),
        (torch.arange(10)[::2], "contiguous"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "device 'meta'.*cpu"),
        (torch.zeros(2, dtype=torch.int64).to_sparse(), "sparse"),
    ],
)
def test_other_tensors_are_refused_by_table_and_remedy(bad, message):
    with pytest.raises(UsageError, match=f"'t'.*{message}"):
        _C.AccessCounter(name="t", num_rows=5).observe(bad)


def test_a_bad_index_in_a_tensor_is_named():
    with pytest.raises(RowIndexError, match="'t': index 7 at position 1"):
        _C.AccessCounter(name="t", num_rows=5).observe(torch.tensor([[0, 7]]))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_change_is_measured_in_every_floating_dtype(dtype):
    torch.manual_seed(0)
    weight = torch.randn(300, 9).to(dtype)
    meter = _C.ChangeMeter(name="t", weight=weight)
    before = weight.clone()
    weight += torch.randn(300, 9).to(dtype)
    meter.observe(torch.arange(0, 300, 2))
    wide = torch.float64
    changes = (weight.to(wide) - before.to(wide)).norm(dim=1)[::2]
    expected = np.sort(2 * torch.topk(changes, 40).indices.numpy())
    np.testing.assert_array_equal(meter.select(0, 300, 40, weight=weight), expected)
    taken = meter.take(torch.from_numpy(expected), weight=weight)
    assert taken.row_ids.tolist() == expected.tolist()


def test_a_parameter_is_a_weight():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    meter = _C.ChangeMeter(name="t", weight=weight)
    meter.observe(torch.tensor([1]))
    assert meter.select(0, 4, 2, weight=weight).tolist() == [1]


def test_top_rows_reads_tensors():
    assert _C.top_rows(torch.tensor([0.5, 0.0, 2.0]), 2).tolist() == [0, 2]


def test_subnormal_scores_count_where_a_thread_flushes_them():
    torch.set_flush_denormal(True)
    try:
        scores = np.array([0, 1, 2, 0, 1], dtype=np.uint32).view(np.float32)
        assert _C.top_rows(scores, 9).tolist() == [1, 2, 4]
        assert _C.top_rows(scores, 2).tolist() == [1, 2]
    finally:
        torch.set_flush_denormal(False)
