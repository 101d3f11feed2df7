"""csrc/pipeline/segment_restore.h: damage is found, named, and nothing of it is written."""

import errno
import os
import resource
import time
from contextlib import contextmanager
from threading import Timer

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import StorageError
from python_tests.csrc import segments
from python_tests.csrc.segments import HEADER, random_table


def _tables():
    return [
        random_table("ranged", 3000, 16),
        random_table("chosen", 4000, 8, row_ids=np.arange(1, 4000, 2)),
        random_table("tiny", 3, 1),
    ]


def _pieces(segment):
    """(chunk index, piece index, begin, end) of every piece in the file."""
    for index, (i, first, count, _, _) in enumerate(segment.chunks):
        table = segment.layout.tables[i]
        for piece, (name, offset) in enumerate(segment.layout.offsets[i].items()):
            width = 8 if name == "" else table.arrays[name][:1].nbytes
            begin = offset + first * width
            yield index, piece, begin, begin + segments.align_up(count * width)


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    written = segments.write_segment(tmp_path_factory.mktemp("damage") / "s", _tables())
    assert len(written.chunks) > 4
    return written


@given(data=st.data())
def test_any_flipped_bit_is_reported_and_nothing_of_its_chunk_is_written(
    segment, tmp_path_factory, data
):
    image = bytearray(segment.path.read_bytes())
    place = data.draw(st.integers(len(HEADER), len(image) - 1))
    image[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip") / "s"
    path.write_bytes(image)
    [(bad, piece)] = [(i, p) for i, p, begin, end in _pieces(segment) if begin <= place < end]
    i, first, count, _, checksums = segment.chunks[bad]
    targets = [table.emptied() for table in segment.layout.tables]
    again = segments.Segment(path, segment.layout, segment.chunks)
    slots = native.SlotPool(num_slots=2, slot_bytes=1 << 20)
    result = segments.restore(again, targets, slots=slots, direct_io=data.draw(st.booleans()))
    assert slots.num_free == 2
    [(table, damaged_first, damaged_count, reason, row_ids)] = result["damaged"]
    assert (table, damaged_first, damaged_count) == (i, first, count)
    assert f"recorded {checksums[piece]:08x}" in reason
    source = segment.layout.tables[i]
    lost = source.saved_ids[first : first + count]
    if source.row_ids is not None and piece == 0:
        assert row_ids is None, "row ids that fail their checksum are not to be believed"
    else:
        np.testing.assert_array_equal(row_ids, lost)
    result = segments.restore(again, targets, [(100, 200)] * 3)
    for *_, row_ids in result["damaged"]:  # of those that are wanted
        assert row_ids is None or row_ids.tolist() == [row for row in lost if 100 <= row < 200]
    for j, (table, target) in enumerate(zip(segment.layout.tables, targets, strict=True)):
        saved = table.saved_ids if j != i else np.setdiff1d(table.saved_ids, lost)
        for name, array in table.arrays.items():
            expected = table.emptied().arrays[name]
            expected[saved] = array[saved]
            assert target.arrays[name].tobytes() == expected.tobytes()


def test_a_missing_file_is_every_chunk_damaged(segment, tmp_path):
    lost = segments.Segment(tmp_path / "gone", segment.layout, segment.chunks)
    targets = [table.emptied() for table in segment.layout.tables]
    result = segments.restore(lost, targets)
    assert [chunk[:3] for chunk in result["damaged"]] == [chunk[:3] for chunk in segment.chunks]
    assert all("No such file" in chunk[3] for chunk in result["damaged"])
    for table, _, _, _, row_ids in result["damaged"]:  # those of a range need no file
        assert (row_ids is None) == (targets[table].row_ids is not None)
    assert result["rows_restored"] == [0, 0, 0]
    assert result["bytes_read"] == 0


@contextmanager
def no_descriptors(seconds=None):
    """The process can open no file inside the block, or for so long."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))

    def allow():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    timer = Timer(seconds or 0, allow)
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        allow()


def test_a_file_that_cannot_be_opened_is_waited_for_and_is_no_damage(segment):
    targets = [table.emptied() for table in segment.layout.tables]
    started = time.monotonic()
    with no_descriptors(), pytest.raises(StorageError) as error:
        segments.restore(segment, targets, pauses_seconds=[0.05, 0.1])
    assert error.value.errno == errno.EMFILE
    assert 0.15 <= time.monotonic() - started < 30
    with no_descriptors(seconds=0.05):
        result = segments.restore(segment, targets, pauses_seconds=[0.02] * 200)
    assert result["damaged"] == []
    assert sum(result["rows_restored"]) == 3000 + 2000 + 3


@given(
    st.sampled_from([0, 1, 700, 1023, 1024, 1998, 1999]),
    st.sampled_from([-1, -(2**63), 2**63 - 2, 4000, 2**40, "repeat", "swap"]),
)
def test_hostile_row_ids_behind_a_valid_checksum_are_damage(tmp_path_factory, place, value):
    """The file is as its writer meant it, checksums and all; only its ids are impossible."""
    path = tmp_path_factory.mktemp("hostile") / "s"
    table = random_table("t", 4000, 8, row_ids=np.arange(1, 4000, 2))
    pipe = segments.pipeline(2, 16 * segments.ALIGNMENT)
    segment = segments.write_segment(path, [table], pipe=pipe)
    assert [chunk[1:3] for chunk in segment.chunks] == [(0, 1024), (1024, 976)]
    ids = table.row_ids.copy()
    neighbour = place + 1 if place in (0, 1024) else place - 1  # of the same chunk
    if value == "repeat":
        ids[place] = ids[neighbour]
    elif value == "swap":
        ids[[place, neighbour]] = ids[[neighbour, place]]
    else:
        ids[place] = value
    image = bytearray(path.read_bytes())
    offset = segment.layout.offsets[0][""]
    image[offset : offset + ids.nbytes] = ids.tobytes()
    path.write_bytes(image)
    chunks = []
    for i, first, count, step, checksums in segment.chunks:
        begin = offset + 8 * first
        piece = image[begin : begin + segments.align_up(8 * count)]
        chunks.append((i, first, count, step, [native.crc32c(piece), *checksums[1:]]))
    target = table.emptied()
    everything = [(0, 2**63 - 1)]
    result = segments.restore(segments.Segment(path, segment.layout, chunks), [target], everything)
    bad = int(place >= 1024)
    [(_, first, count, reason, row_ids)] = result["damaged"]
    assert (first, count) == chunks[bad][1:3]
    assert "out of order or of range" in reason
    assert row_ids is None
    untouched = table.emptied()
    good = slice(1024, 2000) if bad == 0 else slice(0, 1024)
    for name, array in table.arrays.items():
        untouched.arrays[name][table.row_ids[good]] = array[table.row_ids[good]]
        assert target.arrays[name].tobytes() == untouched.arrays[name].tobytes()


def test_row_ids_that_are_not_wanted_need_no_memory(tmp_path):
    """A process that holds a part of a table restores it from a segment that holds more."""
    table = random_table("t", 100, 4, row_ids=np.array([5, 50, 99]))
    segment = segments.write_segment(tmp_path / "s", [table])
    target = table.emptied()
    target.arrays = {name: array[:60].copy() for name, array in target.arrays.items()}
    result = segments.restore(segment, [target], [(0, 60)])
    assert (result["damaged"], result["rows_restored"]) == ([], [2])
    for name, array in target.arrays.items():
        assert array[[5, 50]].tobytes() == table.arrays[name][[5, 50]].tobytes()
    target.arrays["weight"] = table.emptied().arrays["weight"]  # the other is shorter
    (damaged,) = segments.restore(segment, [target], [(0, 100)])["damaged"]
    assert "row id 99 is out of order or of range" in damaged[3]
    assert (target.arrays["weight"] == table.emptied().arrays["weight"]).all()
