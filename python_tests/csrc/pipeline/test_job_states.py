"""csrc/pipeline/snapshot_pipeline.h: the states of a job, waiting, and giving up."""

import errno
import gc
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext._native import native
from cpr_ext.errors import StorageError, UsageError
from python_tests.csrc import segments
from python_tests.csrc.segments import HEADER, Layout, random_table


def _start(tmp_path, pipe, name="s", **table):
    layout = Layout([random_table("t", **{"num_rows": 20_000, "dim": 16, **table})])
    return segments.start(pipe, tmp_path / name, layout), layout


def test_a_job_goes_through_its_states_in_order_and_refuses_what_comes_too_early_or_twice(tmp_path):
    job, layout = _start(tmp_path, segments.pipeline())
    expected = layout.expected_file()
    del layout  # the job keeps its tables until they are captured
    gc.collect()
    for early in (lambda: job.finish(HEADER), job.mark_committed, job.chunks):
        with pytest.raises(UsageError):
            early()
    with pytest.raises(UsageError, match="captured, written, committed"):
        job.wait("capturing")
    for seconds in (0, 0.05, -1, float("nan")):
        assert job.wait("written", timeout_seconds=seconds) is False
    job.capture(step=1, max_bytes=1)
    assert job.state == "capturing"
    other = threading.Timer(0.3, lambda: segments.capture_all(job))
    other.start()
    assert job.wait("captured")  # as another thread gets there
    other.join()
    assert job.state in ("captured", "written")
    assert job.capture(step=9) == []
    assert job.wait("written")
    with pytest.raises(UsageError, match="before finish"):
        job.mark_committed()
    job.finish(HEADER)
    with pytest.raises(UsageError, match="called before"):
        job.finish(HEADER)
    assert job.state == "written"
    job.mark_committed()
    job.mark_committed()
    assert job.wait("captured", timeout_seconds=0)
    job.cancel("too late")
    assert job.state == "committed"
    assert job.chunks()
    assert (tmp_path / "s").read_bytes() == expected


def test_a_log_tells_when_each_slot_was_checked_and_then_written(tmp_path):
    pipe = segments.pipeline()
    pipe.start_log()
    begin = time.perf_counter_ns()
    for name in "ab":  # after the second one, all of the first is noted
        job, _ = _start(tmp_path, pipe, name)
        segments.capture_all(job)
        job.wait("written")
    log, end = pipe.stop_log(), time.perf_counter_ns()
    checks, writes = (
        [entry[1:] for entry in log if entry[0] == what] for what in ("check", "write")
    )
    assert 2 <= len(checks) == len(log) - len(writes) <= len(writes) + 1
    for spans in (checks, writes):
        moments = [moment for span in spans for moment in span]
        assert moments == sorted(moments), "a thread did two things at once"
        assert begin <= moments[0] <= moments[-1] <= end
    assert all(check[1] <= write[0] for check, write in zip(checks, writes, strict=False))
    assert pipe.stop_log() == []


def test_written_means_that_every_chunk_has_its_checksums(tmp_path, faulty):
    """The writer may be done with one slot at the very moment in which the last is handed over."""
    code = """
    import sys
    from pathlib import Path
    from python_tests.csrc import segments
    pipe = segments.pipeline()
    for i in range(5):
        layout = segments.Layout([segments.random_table(num_rows=2000, dim=16)])
        job = segments.start(pipe, Path(sys.argv[1]) / str(i), layout)
        assert len(job.capture(step=1)) == 2
        job.wait("written")
        assert [len(chunk[4]) for chunk in job.chunks()] == [2, 2]
        job.cancel("enough")
    """
    segments.run_python(code, tmp_path, preload=faulty, SLOW_NOTIFY="30")


@given(st.integers(0, 6), st.sampled_from(["capturing", "captured", "written", "finished"]))
def test_cancel_at_any_time_leaves_no_file_and_all_slots_free(tmp_path_factory, calls, moment):
    directory = tmp_path_factory.mktemp("cancel")
    pipe = segments.pipeline()
    job, _ = _start(directory, pipe)
    if moment == "capturing":
        for step in range(calls):
            job.capture(step=step, max_bytes=1, wait_for_slot=True)
    else:
        segments.capture_all(job)
    if moment in ("written", "finished"):
        job.wait("written")
    if moment == "finished":
        job.finish(HEADER)
    job.cancel("changed my mind")
    assert job.state == "failed"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed my mind"):
            job.wait("captured")
    assert pipe.num_free_slots == 2
    # A finished file is the store's: only it knows whether a manifest names it already.
    assert len(list(directory.iterdir())) == (moment == "finished")
    assert job.capture(step=9) == []
    with pytest.raises(RuntimeError, match="changed my mind"):
        job.finish(HEADER)
    with pytest.raises(RuntimeError, match="changed my mind"):
        job.chunks()


def test_finish_and_cancel_at_once_agree_on_whether_there_is_a_file(tmp_path):
    pipe = segments.pipeline()
    for i in range(40):
        directory = tmp_path / str(i)
        directory.mkdir()
        job, _ = _start(directory, pipe, num_rows=100)
        segments.capture_all(job)
        job.wait("written")
        canceller = threading.Thread(target=job.cancel, args=("stop",))
        canceller.start()
        try:
            job.finish(HEADER)
        except RuntimeError:
            assert list(directory.iterdir()) == []
        else:
            assert len(list(directory.iterdir())) == 1
        canceller.join()


def test_a_job_that_fails_keeps_its_first_error_and_leaves_the_others_alone(tmp_path):
    pipe, directory = segments.pipeline(), tmp_path / "d"
    directory.mkdir()
    first, _ = _start(directory, pipe)
    first.capture(step=1, max_bytes=1)
    while pipe.num_free_slots < 2:
        time.sleep(0.001)
    shutil.rmtree(directory)
    bad, _ = _start(directory, pipe, name="other")
    good, layout = _start(tmp_path, pipe)
    bad.capture(step=1, max_bytes=1, wait_for_slot=True)
    segments.capture_all(good)
    segments.capture_all(bad)
    good.wait("written")
    good.finish(HEADER)
    assert (tmp_path / "s").read_bytes() == layout.expected_file()
    for _ in range(3):
        with pytest.raises(StorageError, match="No such file") as caught:
            bad.wait("written")
        assert caught.value.errno == errno.ENOENT
    bad.cancel("a later reason")
    for late in (lambda: bad.wait("captured", timeout_seconds=0), bad.mark_committed, bad.chunks):
        with pytest.raises(StorageError):
            late()
    assert bad.capture(step=2) == []
    first.cancel("its file is gone")
    assert not directory.exists()
    assert pipe.num_free_slots == 2


def test_a_capture_without_a_free_slot_stops_and_one_that_fails_reports_no_rows(tmp_path, faulty):
    code = """
    import sys, threading, time
    from pathlib import Path
    from python_tests.csrc import segments
    pipe = segments.pipeline()
    layout = segments.Layout([segments.random_table(num_rows=20_000, dim=16)])
    job = segments.start(pipe, Path(sys.argv[1]) / "s", layout)
    assert len(job.capture(step=1)) == 2, "one chunk per slot, then no slot is free"
    assert pipe.num_free_slots == 0
    begin = time.monotonic()
    assert job.capture(step=2) == []
    assert time.monotonic() - begin < 0.5, "did not wait"
    assert len(job.capture(step=3, max_bytes=1, wait_for_slot=True)) == 1, "waited"
    segments.capture_all(job)
    assert job.wait("written", timeout_seconds=0.01) is False
    job.cancel("enough")
    try:
        job.wait("written")
    except RuntimeError:
        pass
    assert pipe.num_free_slots == 2
    job = segments.start(pipe, Path(sys.argv[1]) / "t", layout)
    job.capture(step=1)
    threading.Timer(0.05, job.cancel, ["stop"]).start()
    assert job.capture(step=2, max_bytes=1, wait_for_slot=True) == []
    assert job.state == "failed", "the capture waited for a slot until after the cancel"
    """
    segments.run_python(code, tmp_path, preload=faulty, SLOW_WRITE="100")


def test_jobs_that_are_half_captured_do_not_starve_each_other(tmp_path):
    """Three jobs, two slots, one thread: none may keep a slot between its calls."""
    pipe = segments.pipeline()
    jobs = [_start(tmp_path, pipe, name=str(i)) for i in range(3)]
    while any(job.state == "capturing" for job, _ in jobs):
        for job, _ in jobs:
            job.capture(step=1, max_bytes=1, wait_for_slot=True)
    for i, (job, layout) in enumerate(jobs):
        job.wait("written")
        job.finish(HEADER)
        assert (tmp_path / str(i)).read_bytes() == layout.expected_file()


def test_many_jobs_from_many_threads_share_one_pipeline(tmp_path):
    pipe = segments.pipeline(num_slots=3, num_threads=2)

    def work(i):
        for j in range(5):
            table = random_table("t", 3000, 16, seed=10 * i + j)
            segment = segments.write_segment(tmp_path / f"{i}.{j}", [table], pipe=pipe)
            assert segment.path.read_bytes() == segment.layout.expected_file()

    with ThreadPoolExecutor(5) as workers:
        list(workers.map(work, range(5)))
    assert pipe.num_free_slots == 3


@pytest.mark.parametrize("order", ["job", "pipeline"])
@pytest.mark.parametrize("captured", ["nothing", "some", "all"])
def test_a_pipeline_dropped_with_queued_work_ends_and_leaves_no_file(tmp_path, order, captured):
    for _ in range(10):
        pipe = segments.pipeline()
        kept = {"job": _start(tmp_path, pipe)[0], "pipeline": pipe}
        del pipe
        if captured != "nothing":
            segments.capture_all(kept["job"], max_bytes=int(captured == "some"))
        for first in (order, *kept.keys() - {order}):
            del kept[first]
        gc.collect()
        assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_removes_the_file_nor_stops_the_writer(tmp_path):
    code = """
    import os, sys
    from pathlib import Path
    from python_tests.csrc import segments
    path = Path(sys.argv[1]) / "s"
    pipe = segments.pipeline()
    layout = segments.Layout([segments.random_table(num_rows=20_000, dim=16)])
    job = segments.start(pipe, path, layout)
    job.capture(step=1, max_bytes=1, wait_for_slot=True)
    while pipe.num_free_slots < 2:
        pass
    child = os.fork()
    if child == 0:
        job.cancel("as a child's cleanup would")
        job = pipe = None
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.exists()
    segments.capture_all(job)
    job.wait("written")
    job.finish(segments.HEADER)
    assert path.read_bytes() == layout.expected_file()
    """
    segments.run_python(code, tmp_path)


def test_a_stopped_capture_comes_back_after_one_chunk_and_chunks_are_as_small_as_asked(tmp_path):
    table = segments.random_table(num_rows=20_000)
    smallest = segments.smallest_slot([table])
    pipe = native.SnapshotPipeline(num_slots=2, slot_bytes=8 * smallest)
    stop = native.StopFlag()
    layout = segments.Layout([table])
    job = segments.start(pipe, tmp_path / "s", layout, max_chunk_bytes=smallest)
    stop.set()
    assert stop.is_set()
    (chunk,) = job.capture(step=1, stop=stop, wait_for_slot=True)
    assert chunk[2] * 36 <= smallest
    stop.clear()
    assert len(job.capture(step=1, stop=stop, wait_for_slot=True)) > 5
    assert job.state != "capturing"
    job.wait("written")
    job.finish(segments.HEADER)
    assert (tmp_path / "s").read_bytes() == layout.expected_file()
