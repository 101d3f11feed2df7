"""csrc/storage/: what arrives on disk, byte by byte, and what the system may refuse."""

import errno
import os
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import StorageError, UsageError
from python_tests.csrc import segments
from python_tests.csrc.segments import HEADER, Layout, random_table

DIRECT = pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])


def _failing_job(path, **options):
    pipe = segments.pipeline()
    layout = Layout([random_table()])
    job = segments.start(pipe, path, layout, **options)
    segments.capture_all(job)
    return pipe, job


@DIRECT
def test_the_file_is_the_header_and_the_packed_rows_padded_with_zeroes(tmp_path, direct_io):
    tables = [
        random_table("a", 1000, 16, row_ids=np.arange(3, 1000, 7)),
        random_table("b", 5000, 3),
        random_table("empty", 10, 3, range_rows=0),
        random_table("one", 1, 1),
    ]
    segment = segments.write_segment(tmp_path / "s", tables, direct_io=direct_io)
    assert segment.path.read_bytes() == segment.layout.expected_file()


@DIRECT
def test_every_piece_has_its_checksum_padding_included(tmp_path, direct_io):
    table = random_table("a", 3000, 16, row_ids=np.arange(0, 3000, 2))
    segment = segments.write_segment(tmp_path / "s", [table], direct_io=direct_io)
    image = segment.path.read_bytes()
    widths = {"": 8, "weight": 64, "sum": 4}
    assert len(segment.chunks) > 1
    for _, first, count, _, checksums in segment.chunks:
        expected = []
        for name, offset in segment.layout.offsets[0].items():
            begin = offset + first * widths[name]
            end = begin + segments.align_up(count * widths[name])
            expected.append(native.crc32c(image[begin:end], backend="portable"))
        assert checksums == expected


def test_a_segment_without_rows_is_its_header(tmp_path):
    segment = segments.write_segment(tmp_path / "s", [random_table(num_rows=0)])
    assert segment.path.read_bytes() == HEADER
    assert segment.chunks == []


def test_an_existing_file_is_neither_overwritten_nor_removed(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(b"precious")
    pipe, job = _failing_job(path)
    with pytest.raises(StorageError) as caught:
        job.wait("written")
    assert caught.value.errno == errno.EEXIST
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"precious"
    assert pipe.num_free_slots == 2


def test_a_missing_directory_is_named(tmp_path):
    pipe, job = _failing_job(tmp_path / "gone" / "s")
    with pytest.raises(StorageError, match="gone/s") as caught:
        job.wait("written")
    assert caught.value.errno == errno.ENOENT
    assert pipe.num_free_slots == 2


def test_a_path_with_a_zero_byte_is_refused_and_no_shorter_name_is_created(tmp_path):
    with pytest.raises(TypeError):
        _failing_job(f"{tmp_path}/s\0hidden")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["symlink", "pipe", "directory", "missing", "socket_like"])
def test_what_is_no_regular_file_is_damage_not_a_hang(tmp_path, bad):
    segment = segments.write_segment(tmp_path / "s", [random_table()])
    path = tmp_path / "other"
    if bad == "symlink":
        path.symlink_to(segment.path)
    elif bad == "pipe":
        os.mkfifo(path)
    elif bad == "directory":
        path.mkdir()
    elif bad == "socket_like":
        path = segments.Path("/dev/null")
    segment.path = path
    target = segment.layout.tables[0].emptied()
    result = segments.restore(segment, [target])
    assert result["rows_restored"] == [0]
    assert [chunk[0] for chunk in result["damaged"]] == [0] * len(segment.chunks)
    assert all(str(path) in chunk[3] for chunk in result["damaged"])
    np.testing.assert_array_equal(
        target.arrays["sum"], segment.layout.tables[0].emptied().arrays["sum"]
    )


@pytest.mark.parametrize(
    ("header_bytes", "file_bytes"), [(0, 8192), (100, 8192), (4096, 4095), (8192, 4096), (-4096, 0)]
)
def test_a_plan_that_is_not_in_whole_blocks_is_refused(tmp_path, header_bytes, file_bytes):
    with pytest.raises(UsageError):
        segments.pipeline().start(
            path=str(tmp_path / "s"), header_bytes=header_bytes, file_bytes=file_bytes, tables=[]
        )
    assert list(tmp_path.iterdir()) == []


def test_a_header_of_another_size_than_planned_fails_the_job(tmp_path):
    layout = Layout([random_table()])
    job = segments.start(segments.pipeline(), tmp_path / "s", layout)
    segments.capture_all(job)
    job.wait("written")
    with pytest.raises(UsageError, match="planned were 4096"):
        job.finish(b"short")
    assert job.state == "failed"
    assert list(tmp_path.iterdir()) == []


@given(st.integers(0, 3000), st.integers(1, 300), st.booleans())
def test_a_truncated_file_is_found_at_the_first_missing_chunk(tmp_path_factory, cut, dim, direct):
    path = tmp_path_factory.mktemp("cut") / "s"
    table = random_table(num_rows=2000, dim=dim)
    segment = segments.write_segment(path, [table], pipe=segments.pipeline(2, 1 << 21))
    keep = max(0, segment.layout.file_bytes - 1 - cut * 100)
    os.truncate(path, keep)
    target = table.emptied()
    slots = native.SlotPool(num_slots=2, slot_bytes=1 << 21)
    result = segments.restore(segment, [target], slots=slots, direct_io=direct)
    damaged = {chunk[1] for chunk in result["damaged"]}
    assert damaged, "a byte is missing, so some chunk is"
    assert all("bytes early" in chunk[3] for chunk in result["damaged"])
    for _, first, count, _, _ in segment.chunks:
        source = table if first not in damaged else table.emptied()
        for name in table.arrays:
            np.testing.assert_array_equal(
                target.arrays[name][first : first + count],
                source.arrays[name][first : first + count],
            )


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB, if this machine lets us mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@DIRECT
def test_a_full_disk_fails_the_job_and_leaves_the_space_as_it_was(tiny_disk, direct_io):
    free = os.statvfs(tiny_disk).f_bavail
    pipe = segments.pipeline()
    big = random_table(num_rows=50_000, dim=16)
    job = segments.start(pipe, tiny_disk / "s", Layout([big]), direct_io=direct_io)
    segments.capture_all(job)
    for _ in range(3):  # kept, and told every time
        with pytest.raises(StorageError, match="free space") as caught:
            job.wait("written")
        assert caught.value.errno == errno.ENOSPC
    assert list(tiny_disk.iterdir()) == []
    assert os.statvfs(tiny_disk).f_bavail == free
    assert pipe.num_free_slots == 2
    small = segments.write_segment(tiny_disk / "s", [random_table()], pipe=pipe)
    assert small.path.read_bytes() == small.layout.expected_file()
