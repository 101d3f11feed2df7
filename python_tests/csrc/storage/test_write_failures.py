"""csrc/storage/file.h against devices that write short, fail late or fill up."""

import errno

import pytest

from python_tests.csrc import segments

DIRECT = pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])

ROUND_TRIP = """
import sys
from pathlib import Path
import numpy as np
from python_tests.csrc import segments
path, direct_io = Path(sys.argv[1]) / "s", sys.argv[2] == "True"
table = segments.random_table(num_rows=5000, dim=16, row_ids=np.arange(0, 5000, 3))
segment = segments.write_segment(path, [table], direct_io=direct_io)
assert path.read_bytes() == segment.layout.expected_file()
target = table.emptied()
result = segments.restore(segment, [target], direct_io=direct_io)
assert result["damaged"] == [], result
assert result["rows_restored"] == [len(table.row_ids)]
np.testing.assert_array_equal(target.saved_rows("weight"), table.saved_rows("weight"))
"""

FAILING_SAVE = """
import sys
from pathlib import Path
from cpr_ext.errors import StorageError
from python_tests.csrc import segments
path, direct_io = Path(sys.argv[1]) / "s", sys.argv[2] == "True"
pipe = segments.pipeline()
layout = segments.Layout([segments.random_table(num_rows=5000, dim=16)])
job = segments.start(pipe, path, layout, direct_io=direct_io)
segments.capture_all(job)
codes = []
for _ in range(2):
    try:
        job.wait("written")
        job.finish(segments.HEADER)
    except StorageError as error:
        codes.append(error.errno)
assert job.state == "failed"
assert list(path.parent.iterdir()) == [], "a file was left behind"
assert pipe.num_free_slots == 2
print(*codes)
"""


@DIRECT
@pytest.mark.parametrize("limit", [4096, 5000])  # 5000: the rest of a short write is unaligned
def test_short_and_interrupted_transfers_are_continued(faulty, tmp_path, limit, direct_io):
    segments.run_python(ROUND_TRIP, tmp_path, direct_io, preload=faulty, SHORT_IO=str(limit))


@DIRECT
@pytest.mark.parametrize("lacks", ["NO_FALLOCATE", "NO_DIRECT"])
def test_a_file_system_that_reserves_no_blocks_or_has_no_direct_io_still_gives_a_whole_file(
    faulty, tmp_path, lacks, direct_io
):
    # A last block that no table fills: only its size keeps the file as long as its header says.
    code = ROUND_TRIP.replace("direct_io=direct_io)", "direct_io=direct_io, spare_bytes=4096)", 1)
    segments.run_python(code, tmp_path, direct_io, preload=faulty, **{lacks: "1"})


@DIRECT
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("FAIL_WRITE=0=5000", errno.EIO),
        ("FAIL_WRITE=3=5000", errno.ENOSPC),
        ("FAIL_WRITE=1=10", errno.EIO),
        ("FAIL_SYNC=0=5000", errno.EIO),
    ],
)
def test_a_failing_device_fails_the_job_with_its_errno(faulty, tmp_path, fault, code, direct_io):
    """With 10 rows it is one write, of two pieces that are neighbours, then the header's."""
    name, nth, num_rows = fault.split("=")
    save = FAILING_SAVE.replace("num_rows=5000", f"num_rows={num_rows}")
    rule = {name: f"{nth}:{code}"}
    printed = segments.run_python(save, tmp_path, direct_io, preload=faulty, **rule)
    assert printed.split() == [str(code)] * 2


@DIRECT
def test_a_read_error_is_no_damage_and_the_next_try_restores_all_rows(faulty, tmp_path, direct_io):
    code = ROUND_TRIP.split("target =")[0] + (
        """
import errno
from cpr_ext.errors import StorageError
target = table.emptied()
try:
    segments.restore(segment, [target], direct_io=direct_io)
except StorageError as error:
    assert error.errno == errno.EIO, error
else:
    raise AssertionError("it was not refused")
result = segments.restore(segment, [target], direct_io=direct_io)  # the next read is good
assert result["damaged"] == []
for name, array in target.arrays.items():
    assert (array[table.row_ids] == table.arrays[name][table.row_ids]).all(), name
"""
    )
    segments.run_python(code, tmp_path, direct_io, preload=faulty, FAIL_READ=f"1:{errno.EIO}")


@DIRECT
def test_a_file_size_limit_met_half_way_or_known_beforehand_fails_the_job(tmp_path, direct_io):
    code = """
    import resource, signal, sys
    from pathlib import Path
    from cpr_ext.errors import StorageError
    from python_tests.csrc import segments
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path, direct_io = Path(sys.argv[1]) / "s", sys.argv[2] == "True"
    pipe = segments.pipeline()
    layout = segments.Layout([segments.random_table(num_rows=5000, dim=16)])
    job = segments.start(pipe, path, layout, direct_io=direct_io)
    job.capture(step=1, max_bytes=1)
    while pipe.num_free_slots < 2:
        pass
    assert path.exists() and path.stat().st_size == layout.file_bytes
    # Inside the second chunk and not aligned: a short write, then EFBIG.
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, resource.RLIM_INFINITY))
    segments.capture_all(job, step=2)
    try:
        job.wait("written")
    except StorageError as error:
        print(error.errno)
    assert not path.exists()
    assert pipe.num_free_slots == 2
    """
    assert segments.run_python(code, tmp_path, direct_io).split() == [str(errno.EFBIG)]
    known = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (80_000, -1))\n"
    (tmp_path / "before").mkdir()  # known beforehand: before a byte is written
    printed = segments.run_python(known + FAILING_SAVE, tmp_path / "before", direct_io)
    assert printed.split() == [str(errno.EFBIG)] * 2
