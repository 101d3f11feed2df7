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
    job = segments.start(pipe, path, Layout([random_table()]), **options)
    segments.capture_all(job)
    return pipe, job


@DIRECT
def test_the_file_is_header_and_padded_rows_and_every_piece_has_its_checksum(tmp_path, direct_io):
    tables = [
        random_table("a", 3000, 16, row_ids=np.arange(0, 3000, 2)),
        random_table("b", 5000, 3),
        random_table("empty", 10, 3, range_rows=0),
        random_table("one", 1, 1),
    ]
    segment = segments.write_segment(tmp_path / "s", tables, direct_io=direct_io)
    image = segment.path.read_bytes()
    assert image == segment.layout.expected_file()
    assert len(segment.chunks) > 3  # two of "a"
    for i, first, count, _, checksums in segment.chunks:
        expected = []
        for name, offset in segment.layout.offsets[i].items():
            width = 8 if name == "" else tables[i].arrays[name][:1].nbytes
            begin = offset + first * width
            end = begin + segments.align_up(count * width)
            expected.append(native.crc32c(image[begin:end], backend="portable"))
        assert checksums == expected
    nothing = segments.write_segment(tmp_path / "n", [random_table(num_rows=0)])
    assert (nothing.path.read_bytes(), nothing.chunks) == (HEADER, [])


def test_a_path_that_cannot_be_made_is_named_and_an_existing_file_stays(tmp_path):
    (tmp_path / "s").write_bytes(b"precious")
    for path, code in ((tmp_path / "s", errno.EEXIST), (tmp_path / "gone" / "s", errno.ENOENT)):
        pipe, job = _failing_job(path)
        with pytest.raises(StorageError) as caught:
            job.wait("written")
        assert (caught.value.errno, caught.value.filename) == (code, str(path))
        assert pipe.num_free_slots == 2
    assert (tmp_path / "s").read_bytes() == b"precious"
    with pytest.raises(TypeError):
        _failing_job(f"{tmp_path}/t\0hidden")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_is_no_regular_file_is_damage_not_a_hang(tmp_path):
    segment = segments.write_segment(tmp_path / "s", [random_table()])
    (tmp_path / "symlink").symlink_to(segment.path)
    os.mkfifo(tmp_path / "pipe")
    target = segment.layout.tables[0].emptied()
    for path in (tmp_path / "symlink", tmp_path / "pipe", tmp_path, segments.Path("/dev/null")):
        segment.path = path
        result = segments.restore(segment, [target])
        assert result["rows_restored"] == [0]
        assert [chunk[0] for chunk in result["damaged"]] == [0] * len(segment.chunks)
        assert all(str(path) in chunk[3] for chunk in result["damaged"])
    untouched = segment.layout.tables[0].emptied()
    np.testing.assert_array_equal(target.arrays["sum"], untouched.arrays["sum"])


def test_a_plan_not_in_whole_blocks_or_a_header_of_another_size_is_refused(tmp_path):
    for sizes in ((0, 8192), (100, 8192), (4096, 4095), (8192, 4096), (-4096, 0)):
        with pytest.raises(UsageError):
            segments.pipeline().start(
                path=str(tmp_path / "s"), header_bytes=sizes[0], file_bytes=sizes[1], tables=[]
            )
    _, job = _failing_job(tmp_path / "s")
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
