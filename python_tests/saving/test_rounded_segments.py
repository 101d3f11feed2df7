"""Segments of rounded rows: whatever is captured, what is read is the row or its rounding."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import DamageError
from cpr_ext.saving.segment_capture import SegmentCapture, Source, WriteOptions
from cpr_ext.state.precision import PRECISIONS, round_rows
from cpr_ext.storage.manifest import Manifest
from cpr_ext.storage.segment_format import TableSpec, array_specs
from cpr_ext.storage.segment_header import read_own_record, read_segment
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import open_segment
from python_tests.csrc.staging.test_row_rounding import table_of
from python_tests.helpers import flip, same_bits
from python_tests.storage.test_segment_format import change_own, replace_header

KINDS = st.sampled_from(["training", "training", "bits", "special"])


def write(directory, arrays, row_ids, precisions, *, changed=None, slot_bytes=1 << 20):
    """Capture rows of one table; those ``changed`` are copied first and then overwritten."""
    directory.mkdir(exist_ok=True)
    num_rows = len(next(iter(arrays.values())))
    specs = array_specs("t", arrays, precisions.__getitem__)
    count, begin = (num_rows, 0) if row_ids is None else (len(row_ids), None)
    pipeline = native.SnapshotPipeline(
        num_slots=2, slot_bytes=slot_bytes, copy_on_write_bytes=1 << 22
    )
    capture = SegmentCapture(
        pipeline,
        Manifest(directory),
        snapshot=1,
        kind="base" if row_ids is None else "partial",
        sources=[Source(TableSpec("t", count, begin, specs), arrays, row_ids)],
        metadata={"shard": 0},
        options=WriteOptions(refuse_nan=False, copy_on_write=changed is not None),
    )
    if changed is not None:
        assert not capture.copy_before_change([(0, changed)])
        for array in arrays.values():
            array[changed] = 5
    while capture.is_capturing:
        capture.capture(3, max_bytes=0, wait_for_slot=True)
    return capture.finish(num_samples=1)


def read(directory, record, num_rows):
    segment = open_segment(Manifest(directory), record)
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
@example("int8", "bits", "training", 8, 3000, True, 0)  # sums that float64 rounds
@settings(max_examples=40, deadline=None)
def test_rows_read_are_those_captured_rounded_or_as_they_were(
    tmp_path_factory, precision, kind, state_kind, dim, num_rows, is_range, seed
):
    directory = tmp_path_factory.mktemp("rounded") / "shard-00000"
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
    is_changed = torch.from_numpy(generator.random(num_rows) < 0.2)
    changed = torch.nonzero(is_changed).flatten()
    expected = {name: array[chosen].clone() for name, array in arrays.items()}
    precisions = {"weight": precision, "sum": "float16", "step": "int8"}  # int64 is never rounded

    # Chunks of rows of an odd size are large: each begins on a block of the file.
    slot_bytes = 1 << (20 if dim == 33 else 18)
    record = write(directory, arrays, row_ids, precisions, changed=changed, slot_bytes=slot_bytes)
    segment, ids, found = read(directory, record, num_rows)

    assert torch.equal(ids, chosen)
    assert torch.equal(found["step"], expected["step"])
    # A row is exact as a whole: where one of its arrays breaks the bound, so are the others.
    rounded = {n: round_rows(expected[n], precisions[n]) for n in ("weight", "sum")}
    is_rounded = torch.ones(len(chosen), dtype=torch.bool)
    for name, values in rounded.items():
        is_rounded &= (found[name].view(torch.int32) == values.view(torch.int32)).all(1)
    is_exact = torch.ones(len(chosen), dtype=torch.bool)
    for name in rounded:
        is_exact &= (found[name].view(torch.int32) == expected[name].view(torch.int32)).all(1)
    assert bool((is_rounded | is_exact).all())
    largest = segment.rounded.largest_error
    for name in rounded:
        errors = (found[name] - expected[name]).abs()[~is_exact]
        assert errors.numel() == 0 or float(errors.max()) <= largest
    assert read_own_record(segment.path) == record


def test_the_stored_bytes_are_those_of_the_rounding_and_exact_rows_are_apart(tmp_path):
    weight = torch.randn(500, 16)
    weight[7, 3], weight[300, 0] = float("inf"), float("nan")
    directory = tmp_path / "shard-00000"
    record = write(directory, {"weight": weight}, None, {"weight": "int8"})
    segment = open_segment(Manifest(directory), record)
    rows = SegmentRows(segment, {"t": (0, 500)})
    stored, exact = rows.stored(0)
    assert stored["weight"].shape == (500, 24)
    assert {7, 300} <= set(exact.tolist())
    assert segment.layout.bytes_by_precision()["int8"] == 500 * 24
    assert same_bits(rows.rows(0).arrays["weight"][[7, 300]], weight[[7, 300]])


@pytest.mark.parametrize("piece", ["row ids", "levels", "exact rows"])
def test_a_flipped_bit_in_any_piece_is_found(tmp_path, piece):
    weight = torch.randn(4000, 16)
    weight[6, 3] = float("inf")
    directory = tmp_path / "shard-00000"
    record = write(directory, {"weight": weight}, np.arange(0, 4000, 3), {"weight": "int4"})
    segment = open_segment(Manifest(directory), record)
    offsets = {
        "row ids": segment.layout.offset(0, "row_ids"),
        "levels": segment.layout.offset(0, "weight"),
        "exact rows": segment.layout.exact_offsets[0, 0],
    }
    flip(segment.path, offsets[piece] + 2)
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
        change_own(rounding=[]),
        change_own(rounding=[[0, 0, 1335, 0.5]]),
        change_own(rounding=[[0, 0, 1, float("inf")]]),
        change_own(rounding=[[0, 0, 1, "small"]]),
        change_own(rounding=[[0, 0, 0, 0.5]]),
        change_own(rounding=[[0, 0, 1, 0.5], [0, 5, 1, 0.5]]),
        change_own(rounded=[-1, 0.5]),
        change_table(row_id_runs=[]),
        change_table(row_id_runs=[[1334, 0, 1332]]),
        change_table(row_id_runs=[[1334, 5, 2**62]]),
        change_table(row_id_runs=[[1000, 0, 3000], [334, 3000, 3999]]),
        change_table(arrays=1),
        change_table(arrays=-1),
        change_arrays(["weight", "F32", [16], "int3"]),
        change_arrays(["weight", "F64", [16], "int4"]),
        change_arrays(["weight", "F32", [16]]),
        change_arrays(["weight", "F32", [16], "int8"]),
    ],
)
def test_a_header_of_rounded_rows_that_makes_no_sense_is_damage(tmp_path, change):
    weight = torch.randn(4000, 16)
    weight[6, 3] = float("inf")
    directory = tmp_path / "shard-00000"
    record = write(directory, {"weight": weight}, np.arange(0, 4000, 3), {"weight": "int4"})
    path = directory / record.file
    assert open_segment(Manifest(directory), record).layout.rounding[0, 0].num_exact >= 1
    checksum = replace_header(path, record, change)
    with pytest.raises(DamageError, match="not a cpr_ext segment"):
        read_segment(path, header_bytes=record.header_bytes, header_crc32c=checksum)
