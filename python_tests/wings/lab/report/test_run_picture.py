"""The picture and the table of a run."""

from cpr_ext.wings.lab.report.run_picture import _smooth, draw_runs

RUN = {
    "auc": 0.75,
    "losses": [[100.0 * i, 1.0 / i] for i in range(1, 30)],
    "failures": [{"num_samples": 1500, "shards": [0, 3]}],
    "snapshot_log": [[100, "base"], [900, "partial"]],
}


def test_runs_become_a_png_of_a_readable_size(tmp_path):
    picture = tmp_path / "runs.png"
    draw_runs({"a": RUN, "b": {**RUN, "failures": [], "losses": [], "snapshot_log": []}}, picture)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert width >= 1000
    assert height >= 600


def test_smoothing_looks_only_back():
    _, values = _smooth([[i, 0.0 if i < 10 else 5.0] for i in range(20)], window=5)
    assert (values[:10] == 0).all()
    assert values[10] == 1.0
    assert values[14] == 5.0
