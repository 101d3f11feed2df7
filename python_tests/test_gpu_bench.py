"""What of bench/ needs a GPU: it runs on the emulated one; what is made of its results is right."""

import json

import numpy as np
import pytest
import torch

from python_tests.test_bench import load, run


def run_emulated(what, folder):
    return run("-m", "python_tests.emulated_bench", what, str(folder))


# --- it runs ---


@pytest.mark.long
def test_every_stage_of_the_targets_runs_on_the_emulated_device(tmp_path):
    shown = run_emulated("targets", tmp_path)
    assert "0 failed" in shown.splitlines()[-1]
    for stage in (
        "count",
        "select",
        "gather",
        "copy out",
        "training's stream held",
        "training with",
    ):
        assert any(line.startswith(stage) and "x" in line for line in shown.splitlines()), stage
    assert len([line for line in shown.splitlines() if "simplest kernel" in line]) == 3


@pytest.fixture
def bounds(monkeypatch):
    """gpu_bounds with its kernels emulated."""
    from python_tests import emulated_bench

    module = load("gpu_bounds")
    monkeypatch.setattr(module, "library", emulated_bench.compiled_bounds)
    monkeypatch.setattr(load("gpu_device"), "stream", lambda: 0)
    return module


@pytest.mark.parametrize("row_bytes", [64, 256, 512])
def test_the_simplest_kernels_count_and_gather(bounds, row_bytes):
    random = np.random.default_rng(0)
    rows = [3, 1000]
    for returns in (False, True):
        counts = [torch.zeros(n, dtype=torch.int32) for n in rows]
        indices = [torch.from_numpy(random.integers(0, n, 700)) for n in rows]
        bounds.count(bounds.addresses(counts), bounds.addresses(indices), 700, returns=returns)
        for found, looked_up, n in zip(counts, indices, rows, strict=True):
            expected = np.bincount(looked_up.numpy(), minlength=n)
            np.testing.assert_array_equal(found.numpy(), expected)
    table, row_ids = torch.randn(300, row_bytes // 4), torch.randint(300, (101,))
    packed = torch.zeros(101, row_bytes // 4)
    bounds.gather(table, row_ids, packed)
    assert torch.equal(packed, table[row_ids])


def test_a_snapshot_is_recorded_with_what_the_pipelines_threads_did(tmp_path):
    run_emulated("profile", tmp_path)
    events = load("gpu_device").read_events(tmp_path / "trace.json.gz")
    [clock] = [e for e in events if e.name == "cpr_ext clock"]
    done = {e.name: e for e in events if e.category == "cpr_ext"}
    assert set(done) == {"check", "write"}
    for each in done.values():
        assert clock.begin < each.begin < each.end < events[-1].end + 60
    assert done["check"].end <= done["write"].end


def test_the_longest_gap_of_trainings_stream_is_shown(tmp_path, capsys):
    def event(category, name, begin, duration, stream=7):
        times = {"ts": begin, "dur": duration, "args": {"stream": stream}}
        return {"ph": "X", "cat": category, "name": name, **times}

    trace = tmp_path / "trace.json"
    events = [event("kernel", "void at::native::fill", 1000.0 + 100 * i, 90.0) for i in range(20)]
    events += [
        event("kernel", "void cpr_ext::(anonymous namespace)::count_bins_kernel<int>()", 1592, 3.0),
        event("cpr_ext", "write", 1890.0, 200.0),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    load("gpu_profile").show(trace)
    shown = capsys.readouterr().out
    assert "snapshot: 0.5 ms from the first row chosen" in shown
    assert "longest gap in training's stream: 0.010 ms during the snapshot, 0.010 ms out" in shown
    trace.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(RuntimeError, match="no snapshot in training"):
        load("gpu_profile").show(trace)


# --- what is made of results ---


def test_a_stage_that_fails_costs_its_own_rows_only_and_each_row_is_kept_at_once(
    monkeypatch, tmp_path, capsys
):
    targets, table = load("gpu_targets"), load("gpu_table")
    file = tmp_path / "gpu.json"

    def fails(sizes):
        yield table.Target("early", "other", 1.0, 2.0, 1.0, 2.0)
        assert [row["stage"] for row in json.loads(file.read_text())["rows"]] == ["early"]
        raise MemoryError("all is full")

    def goes_on(sizes):
        yield table.Target("late", "other", 1.0, 0.5, 1.0, 0.5)

    monkeypatch.setattr(load("results"), "FOLDER", tmp_path)
    monkeypatch.setattr(targets, "use_training_streams", lambda devices: None)
    monkeypatch.setattr(
        targets.gpu_device,
        "describe",
        lambda: {"gpu": "none", "nvidia_smi": "none", "torch_cuda": "none"},
    )
    monkeypatch.setattr(targets, "STAGES", {"a": (fails, "", 1), "b": (goes_on, "", 1)})
    assert targets.measure(False, None) == 1
    shown = capsys.readouterr().out
    assert "a" + 47 * " " + "FAILED: MemoryError: all is full" in shown
    assert "3 rows: 1 missed, 1 failed" in shown
    kept = json.loads(file.read_text())
    assert [row["stage"] for row in kept["rows"]] == ["early", "a", "late"]
    assert kept["rows"][1]["error"] == "MemoryError: all is full"
    page = "\n".join(load("page").gpu(load("results").Results(tmp_path)))
    assert "| early | other | 2.00x | 1.00x | 1000.000 ms | 2000.000 ms | met |" in page
    assert "| late | other | 0.50x | 1.00x | 1000.000 ms | 500.000 ms | missed |" in page
    assert "a failed: MemoryError: all is full" in page
