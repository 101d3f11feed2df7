"""NaN in rows and dense tensors: refused by name."""

import numpy as np
import pytest

from cpr_ext._native import native
from cpr_ext.errors import NanError
from python_tests.csrc import segments
from python_tests.csrc.segments import Layout, random_table


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("by_id", [True, False])
def test_nan_is_refused_and_the_table_row_and_array_are_named(tmp_path, dtype, by_id):
    table = random_table("users", 9000, 4, **({"row_ids": np.arange(1, 9000, 2)} if by_id else {}))
    table.arrays = {name: array.astype(dtype) for name, array in table.arrays.items()}
    if by_id:
        table.arrays["weight"][::2] = np.nan  # not saved, so it does not matter
    table.arrays["sum"][7123] = np.nan
    pipe = segments.pipeline()
    job = segments.start(pipe, tmp_path / "s", Layout([table]))
    segments.capture_all(job)
    with pytest.raises(NanError, match="table 'users', row 7123: sum is NaN"):
        job.wait("written")
    assert list(tmp_path.iterdir()) == []
    assert pipe.num_free_slots == 2
    segments.write_segment(tmp_path / "s", [table], refuse_nan=False)


def test_nan_in_a_dense_tensor_is_named_by_its_element(tmp_path):
    dense = np.zeros(5000, np.float32)
    dense[4321] = np.nan
    for check_nan in (True, False):
        spec = native.SegmentTable(name="dense", num_rows=dense.nbytes)
        spec.add_bytes("bias", dense, 4096, check_nan=check_nan)
        job = segments.pipeline().start(
            path=str(tmp_path / "s"), header_bytes=4096, file_bytes=4096 + 20480, tables=[spec]
        )
        segments.capture_all(job)
        if check_nan:
            with pytest.raises(NanError, match="table 'dense', element 4321: bias is NaN"):
                job.wait("written")
        else:
            job.wait("written")
