"""A segment is a safetensors file that holds what was saved, laid out for direct I/O."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import torch as safetensors_torch

from cpr_ext._native import native
from cpr_ext.errors import DamageError, StoreError, UsageError
from cpr_ext.saving.segment_capture import SegmentCapture, WriteOptions, table_source
from cpr_ext.state.dtypes import DTYPE_NAMES
from cpr_ext.storage.segment_format import ALIGNMENT, SMALL_BLOCK, described, native_table
from cpr_ext.storage.segment_header import read_segment
from python_tests.helpers import read_chunks, same_bits

BLOCK = 4096


def random_tensor(shape, dtype, seed=0):
    """Any bits, NaN included; bool holds 0 and 1 only."""
    size = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape)


def capture_of(directory, sources, slot_bytes, *, direct_io=True, kind="base"):
    return SegmentCapture(
        native.SnapshotPipeline(num_slots=2, slot_bytes=slot_bytes), Path(directory), snapshot=1,
        snapshot_id="f" * 32, kind=kind, sources=sources, metadata={},
        options=WriteOptions(direct_io, refuse_nan=False),
    )  # fmt: skip


def write(directory, sources, *, slot_bytes=64 << 10, step=7, **options):
    """Write a segment as a snapshot does; returns its path and its record."""
    capture = capture_of(directory, sources, slot_bytes, **options)
    while capture.is_capturing:
        capture.capture(step, max_bytes=0, wait_for_slot=True)
    record = capture.finish(num_samples=70)
    return Path(directory) / record.file, record


def source(name, arrays, *, begin=None, row_ids=None, precisions=None):
    """Rows [begin, ...) of a table, or its rows ``row_ids``."""
    table = table_source(name, arrays, *([precisions.__getitem__] if precisions else []))
    if row_ids is not None:
        return table.rows(row_ids)
    return table.range(begin, len(arrays["weight"]) - begin)


def check_layout(path, record):
    """What the format document says of every segment file."""
    data = path.read_bytes()
    assert len(data) == record.file_bytes
    assert record.header_bytes == 8 + int.from_bytes(data[:8], "little")
    assert native.crc32c(data[: record.header_bytes]) == record.header_crc32c
    header = json.loads(data[8 : record.header_bytes])
    metadata = header.pop("__metadata__")
    own = json.loads(metadata["cpr_ext"])
    block = own["block_bytes"]
    assert record.header_bytes % block == 0 == record.file_bytes % block
    assert (metadata["format"], metadata["format_version"]) == ("cpr_ext.segment", "1")
    spans = sorted((entry["data_offsets"], name) for name, entry in header.items())
    position = 0
    for (begin, end), name in spans:
        assert begin == position, "safetensors allows no holes"
        position = end
        if name.startswith("__pad."):
            assert not any(data[record.header_bytes + begin : record.header_bytes + end])
        else:
            assert begin % block == 0
    assert record.header_bytes + position == record.file_bytes
    pads = sum(end - begin for (begin, end), name in spans if name.startswith("__pad."))
    assert block == SMALL_BLOCK or (block == ALIGNMENT and 64 * pads <= position)
    return own


@st.composite
def saved_tables(draw):
    tables = []
    for name in draw(st.lists(st.sampled_from(["a", "b c", "ü", "x/y"]), unique=True, max_size=3)):
        num_rows = draw(st.integers(1, 30) | st.integers(900, 1100) | st.just(4 * BLOCK))
        arrays = {}
        for array in draw(
            st.sampled_from([["weight"], ["weight", "sum"], ["weight", "exp_avg", "exp_avg_sq"]])
        ):
            row_shape = draw(st.sampled_from([(), (1,), (3,), (4,), (2, 3)]))
            dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
            arrays[array] = random_tensor((num_rows, *row_shape), dtype, draw(st.integers(0, 99)))
        if draw(st.booleans()):
            begin = draw(st.integers(0, num_rows - 1) | st.just(0))
            tables.append((name, arrays, {"begin": begin}))
        else:
            chosen = draw(st.sets(st.integers(0, num_rows - 1), min_size=1))
            row_ids = np.array(sorted(chosen), dtype=np.int64)
            tables.append((name, arrays, {"row_ids": row_ids}))
    return tables


@given(
    tables=saved_tables().filter(bool),
    direct_io=st.booleans(),
    slot_bytes=st.sampled_from([256 << 10, 1 << 20]),
)
def test_the_safetensors_library_reads_back_exactly_the_rows_that_were_saved(
    tables, direct_io, slot_bytes
):
    sources = [source(name, arrays, **rows) for name, arrays, rows in tables]
    with tempfile.TemporaryDirectory() as directory:
        path, record = write(directory, sources, direct_io=direct_io, slot_bytes=slot_bytes)
        own = check_layout(path, record)
        loaded = safetensors_torch.load_file(path)
        for table, arrays, held in tables:
            rows = slice(held["begin"], None) if "begin" in held else held["row_ids"]
            if "row_ids" in held:
                assert loaded.pop(f"{table}/row_ids").tolist() == rows.tolist()
            for name, tensor in arrays.items():
                assert same_bits(loaded.pop(f"{table}/{name}"), tensor[rows])
        assert all(name.startswith("__pad.") for name in loaded)
        assert own["kind"] == "base"
        assert {chunk.step for chunk in read_chunks(path)} == {7}

        # And this package's reader puts the same rows into other tables, and touches no others.
        segment = read_segment(path, record)
        targets = [
            {name: torch.full_like(tensor, 1) for name, tensor in arrays.items()}
            for _, arrays, _ in tables
        ]
        tables_of = enumerate(targets)
        result = native.restore_segment(
            path=str(path),
            tables=[native_table(segment.layout, index, arrays) for index, arrays in tables_of],
            wanted=[(0, len(arrays["weight"])) for arrays in targets],
            chunks=segment.chunks,
            slots=native.SlotPool(num_slots=2, slot_bytes=slot_bytes),
        )
        assert result["damaged"] == []
        for (_, arrays, held), target in zip(tables, targets, strict=True):
            saved = torch.zeros(len(arrays["weight"]), dtype=torch.bool)
            saved[slice(held["begin"], None) if "begin" in held else held["row_ids"]] = True
            for name, tensor in target.items():
                assert same_bits(tensor[saved], arrays[name][saved])
                assert same_bits(tensor[~saved], torch.full_like(tensor, 1)[~saved])


def test_the_planned_header_holds_the_longest_possible_steps(tmp_path):
    rows = source("a", {"weight": torch.ones(5000, 3)}, row_ids=np.arange(5000))
    path, record = write(tmp_path, [rows], slot_bytes=32 << 10, step=2**63 - 1)
    text = path.read_bytes()[8 : record.header_bytes]
    assert record.last_step == 2**63 - 1
    assert len(text) - len(text.rstrip()) < SMALL_BLOCK
    check_layout(path, record)


def test_a_dtype_that_safetensors_lacks_is_refused_by_name():
    with pytest.raises(UsageError, match=r"'a/sum' has dtype torch\.complex64; can be stored: f"):
        described("a", {"sum": torch.zeros(3, dtype=torch.complex64)})


# --- damaged and foreign headers ---


@pytest.fixture
def segment(tmp_path):
    return write(tmp_path, [source("a", {"weight": torch.ones(10, 3)}, begin=0)])


def reread(path, record, **changes):
    return read_segment(path, replace(record, **changes))


def test_a_segment_of_another_snapshot_or_with_an_absurd_header_is_damage(segment):
    """As of another copy of the store: also if its header had the same checksum."""
    path, record = segment
    for change in ({"id": "0" * 32}, {"snapshot": 2}, {"kind": "partial"}):
        with pytest.raises(DamageError, match="its place is that of"):
            reread(path, record, **change)
    for size in (-1, 0, 7, 1 << 40):
        with pytest.raises(DamageError, match=f"header of {size} bytes"):
            reread(path, record, header_bytes=size)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamageError, match=rf"{path}: the file ends inside its header"):
        reread(path, record)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamageError, match="not a regular file"):
        reread(path, record)


def replace_header(path, record, change):
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : record.header_bytes])
    change(header)
    text = json.dumps(header).encode().ljust(record.header_bytes - 8)
    data[8 : record.header_bytes] = text
    path.write_bytes(data)
    return native.crc32c(bytes(data[: record.header_bytes]))


def change_own(**changes):
    """A change of what a header says by itself; None: it is not there."""

    def change(header):
        own = json.loads(header["__metadata__"]["cpr_ext"]) | changes
        own = {key: value for key, value in own.items() if value is not None}
        header["__metadata__"]["cpr_ext"] = json.dumps(own)

    return change


def change_table(**changes):
    def change(header):
        own = json.loads(header["__metadata__"]["cpr_ext"])
        change_own(tables=[own["tables"][0] | changes])(header)

    return change


PLAIN = [
    lambda header: header.pop("__metadata__"),
    lambda header: header["__metadata__"].update(format="pt"),
    lambda header: header["__metadata__"].update(format_version="one"),
    lambda header: header["__metadata__"].pop("cpr_ext"),
    lambda header: header["__metadata__"].update(cpr_ext="["),
    *(change_own(**{name: None}) for name in ("tables", "arrays", "block_bytes", "chunks")),
    change_own(arrays=[]),
    *(change_own(block_bytes=value) for value in (16, True, 8.0, 4096)),
    change_own(tables=[{"name": "a"}]),
    change_own(chunks=[[0, -1, 10, 7, ["00000000"]]]),
    change_own(chunks=[[0, 0, 10, 7, ["not hexadecimal"]]]),
    change_own(chunks=[[0, 0, True, 7, []]]),
    change_own(chunks=7),
]
ROUNDED = [
    change_table(arrays=1),
    change_table(arrays=-1),
    change_own(arrays=[[["weight", "F32", [16], "int4"]]]),
    change_own(arrays=[[["weight", "F64", [16], "int8"]]]),
    change_own(arrays=[[["weight", "F32", [16]]]]),
    change_own(arrays=[[["weight", "F32", [16], "float16"]]]),
]


@pytest.mark.parametrize(
    ("change", "precision"),
    [*((change, None) for change in PLAIN), *((change, "int8") for change in ROUNDED)],
)
def test_a_header_with_a_checksum_that_makes_no_sense_is_damage(tmp_path, change, precision):
    arrays, precisions = {"weight": torch.ones(10, 16)}, precision and {"weight": precision}
    path, record = write(tmp_path, [source("a", arrays, begin=0, precisions=precisions)])
    reread(path, record)
    checksum = replace_header(path, record, change)
    with pytest.raises(DamageError, match="not a cpr_ext segment"):
        reread(path, record, header_crc32c=checksum)


def test_an_unknown_format_version_is_refused_with_the_remedy(segment):
    path, record = segment
    checksum = replace_header(
        path, record, lambda header: header["__metadata__"].update(format_version="2")
    )
    with pytest.raises(StoreError, match=r"version 2; this release reads 1\. Use") as e:
        reread(path, record, header_crc32c=checksum)
    assert not isinstance(e.value, DamageError)
