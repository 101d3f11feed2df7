"""The picture of a snapshot on a GPU, from a trace such as torch.profiler writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from python_tests.test_bench import load
from python_tests.test_gpu_bench import run_emulated

timeline = load("gpu_timeline")

OURS = "void cpr_ext::(anonymous namespace)::{}<true>(cpr_ext::(anonymous namespace)::RowCopies)"
THEIRS = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"


def event(category: str, name: str, begin: float, duration: float, **arguments: Any) -> Any:
    """As torch.profiler writes one; times in microseconds."""
    return {
        **{"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7},
        **{"ts": begin, "dur": duration, "args": {"device": 0, **arguments}},
    }


def write_trace(path: Path, events: list[Any]) -> Path:
    others = [
        {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "name": "ac2g", "cat": "ac2g", "ts": 1.0, "pid": 0, "tid": 7},
        event("cpu_op", "aten::add", 990.0, 900.0),
        event("cuda_runtime", "cudaLaunchKernel", 991.0, 5.0, correlation=3),
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*others, *events]}))
    return path


def a_snapshot() -> list[Any]:
    """Two streams of one snapshot between training's steps, from 1000 us on."""
    training = [event("kernel", THEIRS, 1000.0 + 100 * i, 90.0, stream=7) for i in range(20)]
    return [
        *training,
        event("kernel", OURS.format("lookups_kernel"), 1092.0, 5.0, stream=7),
        event("kernel", OURS.format("count_bins_kernel"), 1592.0, 3.0, stream=7),
        event("kernel", OURS.format("take_counts_kernel"), 1795.0, 1.0, stream=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1690.0, 2.0, stream=7),
        event("kernel", OURS.format("copy_rows_kernel"), 1692.0, 6.0, stream=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1700.0, 150.0, stream=16),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1700.0, 1.0, stream=20),
        event("cpr_ext", "check", 1860.0, 30.0),
        event("cpr_ext", "write", 1890.0, 200.0),
    ]


def test_lanes_are_told_by_streams_and_names(tmp_path: Path) -> None:
    found = timeline.timeline_of(
        timeline.read_events(write_trace(tmp_path / "trace.json", a_snapshot()))
    )
    assert list(found.lanes) == ["training's stream", "stream of copies", "checker", "writer"]
    stages = timeline.seconds_by_stage(found.lanes["training's stream"])
    ours = {"count": 5e-6, "choose": 3e-6, "upload": 2e-6, "gather": 6e-6, "clear": 1e-6}
    assert stages == pytest.approx({"training": 1800e-6, **ours})
    [copy] = found.lanes["stream of copies"]
    assert (copy.what, copy.begin, copy.end) == pytest.approx(("copy out", 700e-6, 850e-6))
    assert found.snapshot == pytest.approx((592e-6, 1090e-6))


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    events = timeline.read_events(write_trace(tmp_path / "trace.json", []))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        timeline.kernel_seconds_of(events)
    with pytest.raises(RuntimeError, match="no kernels of training"):
        timeline.timeline_of(events)


times = st.integers(0, 60)


def test_a_picture_is_drawn_and_the_gap_is_told(tmp_path: Path, capsys: Any) -> None:
    trace = write_trace(tmp_path / "trace.json", a_snapshot())
    picture = tmp_path / "new" / "picture.png"
    load("gpu_profile").show(trace, picture)
    shown = capsys.readouterr().out
    assert "snapshot: 0.5 ms from the first row chosen" in shown
    assert "training's stream:" in shown
    assert "gather 0.006 ms" in shown
    assert (
        "longest gap in training's stream: 0.010 ms during the snapshot, 0.010 ms outside" in shown
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_snapshot_is_recorded_with_what_the_pipelines_threads_did(tmp_path: Path) -> None:
    run_emulated("profile", tmp_path)
    events = timeline.read_events(tmp_path / "trace.json.gz")
    [clock] = [e for e in events if e.name == "cpr_ext clock"]
    done = {e.name: e for e in events if e.category == timeline.HOST}
    assert set(done) == {"check", "write"}
    for each in done.values():
        assert clock.begin < each.begin < each.end < events[-1].end + 60
    assert done["check"].end <= done["write"].end
