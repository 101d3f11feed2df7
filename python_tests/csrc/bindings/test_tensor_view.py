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


RECORD = np.zeros(8, dtype=[("value", np.float32), ("other", np.float32)])
PACKED = np.zeros(8, dtype=[("value", np.float32), ("row_id", np.int64), ("flag", np.uint8)])
TABLE = np.zeros((8, 2))
REFUSED = {
    "a stride of no whole element": (PACKED["value"], None, "whole elements"),
    "ids of such a stride": (TABLE, PACKED["row_id"], "whole elements"),
    "ids at an odd address": (TABLE, np.zeros(33, np.uint8)[1:].view(np.int64), "unaligned"),
    "Python objects": (np.array(["a", "b"], dtype=object), None, "Python objects"),
    **{
        f"ids of {dtype}": (TABLE, np.zeros(4, dtype), "allowed: int64")
        for dtype in ("int32", "uint64", "float64", ">i8")
    },
    "every other column": (np.zeros((4, 4))[:, ::2], None, "contiguous"),
    "transposed": (np.zeros((4, 4)).T[:, :2], None, "contiguous"),
    "reversed": (np.zeros((4, 4))[::-1], None, "reverse"),
    "broadcast": (np.broadcast_to(np.zeros((1, 4)), (5, 4)), None, "overlap"),
    "no columns": (np.zeros((4, 0)), None, "no bytes"),
}


def test_what_cannot_be_copied_is_refused_with_the_reason_and_strided_elements_are_read():
    for table, row_ids, why in REFUSED.values():
        with pytest.raises(UsageError, match=why):
            _gather(table, row_ids)
    for table, why in (
        ([[1.0]], "a list; allowed: torch.Tensor, numpy"),
        (np.array(1.0), "scalar"),
    ):
        with pytest.raises(UsageError, match=why):
            native.gather_rows(table, np.zeros(1, np.int64), np.zeros((1, 1)))
    RECORD["value"] = np.arange(8)
    np.testing.assert_array_equal(_gather(RECORD["value"]), np.arange(8, dtype=np.float32))
