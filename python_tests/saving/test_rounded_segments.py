"""Segments of rounded rows: whatever is captured, what is read is its rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext.errors import DamageError
from cpr_ext.state.precision import PRECISIONS, round_rows
from cpr_ext.storage.segment_header import read_segment
from cpr_ext.storage.segment_reader import SegmentRows
from python_tests.csrc.staging.test_row_rounding import table_of
from python_tests.helpers import flip, same_bits
from python_tests.storage.test_segment_format import source, write

KINDS = st.sampled_from(["training", "training", "bits", "special"])


def read(path, record, num_rows):
    """The segment; ids and arrays of its rows."""
    segment = read_segment(path, record)
    rows = SegmentRows(segment, {"t": (0, num_rows)})
    chunks = [rows.rows(chunk) for chunk in rows.chunks_of("t")]
    names = chunks[0].arrays
    arrays = {name: torch.cat([chunk.arrays[name] for chunk in chunks]) for name in names}
    return segment, torch.cat([chunk.row_ids for chunk in chunks]), arrays


@given(
    st.sampled_from(PRECISIONS[1:]),
    KINDS,
    KINDS,
    st.sampled_from([8, 16, 33]),
    st.sampled_from([1, 50, 3000]),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_rows_read_are_those_captured_rounded(
    tmp_path_factory, precision, kind, state_kind, dim, num_rows, is_range, seed
):
    generator = np.random.default_rng(seed)
    arrays = {
        "weight": torch.from_numpy(table_of(kind, num_rows, dim, seed)),
        "sum": torch.from_numpy(table_of(state_kind, num_rows, 4, seed + 1)),
        "step": torch.arange(num_rows),
    }
    precisions = {"weight": precision, "sum": "float16", "step": "int8"}  # int64 is never rounded
    row_ids = np.flatnonzero(generator.random(num_rows) < 0.3)
    row_ids = row_ids if len(row_ids) else np.array([num_rows - 1])
    chosen = torch.arange(num_rows) if is_range else torch.from_numpy(row_ids)
    held = {"begin": 0} if is_range else {"row_ids": row_ids}
    # Chunks of rows of an odd size are large: each begins on a block of the file.
    path, record = write(
        tmp_path_factory.mktemp("rounded"), [source("t", arrays, precisions=precisions, **held)],
        slot_bytes=1 << (20 if dim == 33 else 18), direct_io=False,
    )  # fmt: skip
    segment, ids, found = read(path, record, num_rows)
    assert segment.is_rounded
    assert torch.equal(ids, chosen)
    assert torch.equal(found["step"], arrays["step"][chosen])
    for name in ("weight", "sum"):
        assert same_bits(found[name], round_rows(arrays[name][chosen], precisions[name]))


@pytest.mark.parametrize("piece", ["row_ids", "weight"])
def test_a_flipped_bit_in_any_piece_is_found(tmp_path, piece):
    weight, row_ids = torch.randn(4000, 16), np.arange(0, 4000, 3)
    rows = source("t", {"weight": weight}, row_ids=row_ids, precisions={"weight": "int8"})
    path, record = write(tmp_path, [rows], slot_bytes=1 << 20)
    segment = read_segment(path, record)
    flip(path, segment.layout.offset(0, piece) + 2)
    with pytest.raises(DamageError, match="checksum"):
        read(path, record, 4000)
