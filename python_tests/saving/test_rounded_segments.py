"""Segments of rounded rows: whatever is captured, what is read is its rounding."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import DamageError
from cpr_ext.saving.segment_capture import SegmentCapture, WriteOptions, table_source
from cpr_ext.state.precision import PRECISIONS, round_rows
from cpr_ext.storage.segment_header import read_segment
from cpr_ext.storage.segment_reader import SegmentRows
from python_tests.csrc.staging.test_row_rounding import table_of
from python_tests.helpers import flip, same_bits
from python_tests.storage.test_segment_format import change_own, replace_header

KINDS = st.sampled_from(["training", "training", "bits", "special"])


def write(directory, arrays, row_ids, precisions, *, slot_bytes=1 << 20):
    """Capture rows of one table."""
    directory.mkdir(exist_ok=True)
    num_rows = len(next(iter(arrays.values())))
    table = table_source("t", arrays, precisions.__getitem__)
    pipeline = native.SnapshotPipeline(num_slots=2, slot_bytes=slot_bytes)
    capture = SegmentCapture(
        pipeline,
        directory,
        snapshot=1,
        snapshot_id="f" * 32,
        kind="base" if row_ids is None else "partial",
        sources=[table.range(0, num_rows) if row_ids is None else table.rows(row_ids)],
        metadata={},
        options=WriteOptions(refuse_nan=False),
    )
    while capture.is_capturing:
        capture.capture(3, max_bytes=0, wait_for_slot=True)
    return capture.finish(num_samples=1)


def read(directory, record, num_rows):
    segment = read_segment(directory / record.file, record)
    rows = SegmentRows(segment, {"t": (0, num_rows)})
    chunks = [rows.rows(chunk) for chunk in rows.chunks_of("t")]
    ids = torch.cat([chunk.row_ids for chunk in chunks])
    names = chunks[0].arrays
    return segment, ids, {n: torch.cat([chunk.arrays[n] for chunk in chunks]) for n in names}


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
    directory = tmp_path_factory.mktemp("rounded") / "segments"
    generator = np.random.default_rng(seed)
    weight = torch.from_numpy(table_of(kind, num_rows, dim, seed))
    state = torch.from_numpy(table_of(state_kind, num_rows, 4, seed + 1))
    step = torch.arange(num_rows)
    arrays = {"weight": weight, "sum": state, "step": step}
    row_ids = None
    if not is_range:
        row_ids = np.flatnonzero(generator.random(num_rows) < 0.3)
        row_ids = row_ids if len(row_ids) else np.array([num_rows - 1])
    chosen = torch.arange(num_rows) if row_ids is None else torch.from_numpy(row_ids)
    expected = {name: array[chosen].clone() for name, array in arrays.items()}
    precisions = {"weight": precision, "sum": "float16", "step": "int8"}  # int64 is never rounded

    # Chunks of rows of an odd size are large: each begins on a block of the file.
    slot_bytes = 1 << (20 if dim == 33 else 18)
    record = write(directory, arrays, row_ids, precisions, slot_bytes=slot_bytes)
    segment, ids, found = read(directory, record, num_rows)

    assert segment.is_rounded
    assert torch.equal(ids, chosen)
    assert torch.equal(found["step"], expected["step"])
    for name in ("weight", "sum"):
        assert same_bits(found[name], round_rows(expected[name], precisions[name]))


@pytest.mark.parametrize("piece", ["row_ids", "weight"])
def test_a_flipped_bit_in_any_piece_is_found(tmp_path, piece):
    directory = tmp_path / "segments"
    arrays = {"weight": torch.randn(4000, 16)}
    record = write(directory, arrays, np.arange(0, 4000, 3), {"weight": "int8"})
    segment = read_segment(directory / record.file, record)
    flip(segment.path, segment.layout.offset(0, piece) + 2)
    with pytest.raises(DamageError, match="checksum"):
        read(directory, record, 4000)


def change_arrays(*arrays):
    """Return a change of the arrays of the first table in a header."""
    return change_own(arrays=[list(arrays)])


def change_table(**changes):
    """Return a change of the first table in a header."""

    def change(header):
        own = json.loads(header["__metadata__"]["cpr_ext"])
        own["tables"][0].update(changes)
        header["__metadata__"]["cpr_ext"] = json.dumps(own)

    return change


@pytest.mark.parametrize(
    "change",
    [
        change_table(arrays=1),
        change_table(arrays=-1),
        change_arrays(["weight", "F32", [16], "int4"]),
        change_arrays(["weight", "F64", [16], "int8"]),
        change_arrays(["weight", "F32", [16]]),
        change_arrays(["weight", "F32", [16], "float16"]),
    ],
)
def test_a_header_of_rounded_rows_that_makes_no_sense_is_damage(tmp_path, change):
    directory = tmp_path / "segments"
    arrays = {"weight": torch.randn(4000, 16)}
    record = write(directory, arrays, np.arange(0, 4000, 3), {"weight": "int8"})
    path = directory / record.file
    checksum = replace_header(path, record, change)
    with pytest.raises(DamageError, match="not a cpr_ext segment"):
        read_segment(path, replace(record, header_crc32c=checksum))
