"""csrc/bindings/tensor_view.h: what may cross into the core, and what is refused before it does."""

import numpy as np
import pytest

from cpr_ext._native import native
from cpr_ext.errors import UsageError


def _gather(table, row_ids=None):
    row_ids = np.arange(len(table)) if row_ids is None else row_ids
    out = np.zeros((len(row_ids), *table.shape[1:]), table.dtype)
    native.gather_rows(table, row_ids, out)
    return out


def test_a_field_of_a_packed_record_is_refused_since_its_stride_is_no_whole_element():
    record = np.zeros(8, dtype=[("value", np.float32), ("flag", np.uint8)])
    record["value"] = np.arange(8)
    with pytest.raises(UsageError, match="whole elements"):
        _gather(record["value"])
    ids = np.zeros(8, dtype=[("row_id", np.int64), ("flag", np.uint8)])["row_id"]
    with pytest.raises(UsageError, match="whole elements"):
        _gather(np.zeros((9, 2)), ids)


def test_a_field_whose_stride_is_whole_elements_is_a_table_of_strided_rows():
    record = np.zeros(8, dtype=[("value", np.float32), ("other", np.float32)])
    record["value"] = np.arange(8)
    np.testing.assert_array_equal(_gather(record["value"]), np.arange(8, dtype=np.float32))


def test_row_ids_at_an_odd_address_are_refused():
    odd = np.zeros(8 * 4 + 1, np.uint8)[1:].view(np.int64)
    with pytest.raises(UsageError, match="unaligned"):
        _gather(np.zeros((4, 2)), odd)


def test_python_objects_are_never_taken_for_bytes():
    with pytest.raises(UsageError, match="Python objects"):
        _gather(np.array(["a", "b"], dtype=object))


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float64, ">i8"])
def test_row_ids_of_another_type_are_refused_by_name(dtype):
    with pytest.raises(UsageError, match="allowed: int64"):
        _gather(np.zeros((4, 2)), np.zeros(4, dtype))


def test_what_is_no_array_is_refused_with_the_allowed_kinds():
    with pytest.raises(UsageError, match=r"a list; allowed: torch.Tensor, numpy.ndarray"):
        native.gather_rows([[1.0]], np.zeros(1, np.int64), np.zeros((1, 1)))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (np.array(1.0), "scalar"),
        (np.zeros((4, 4))[:, ::2], "contiguous"),
        (np.zeros((4, 4)).T[:, :2], "contiguous"),
        (np.zeros((4, 4))[::-1], "reverse"),
        (np.broadcast_to(np.zeros((1, 4)), (5, 4)), "overlap"),
        (np.zeros((4, 0)), "no bytes"),
    ],
    ids=["scalar", "every_other_column", "transposed", "reversed", "broadcast", "no_columns"],
)
def test_a_table_whose_rows_cannot_be_copied_is_refused(table, why):
    with pytest.raises(UsageError, match=why):
        native.gather_rows(table, np.zeros(1, np.int64), np.zeros((1, 4)))
