"""What a rebuild shows on its way and at its end."""

import logging

from cpr_ext.distributed.identity.supervision import SignsOfLife
from cpr_ext.distributed.parity import rebuild_progress
from cpr_ext.distributed.parity.rebuild_progress import RebuildProgress
from cpr_ext.metrics.parity_metrics import ParityMetrics


def test_a_worker_shows_how_far_its_rows_are_rebuilt(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CPR_ALIVE_FILE", str(tmp_path / "worker-1"))
    signs, metrics = SignsOfLife(tmp_path / "worker-1"), ParityMetrics()
    progress = RebuildProgress(1, metrics)
    progress.begin(4_000_000, own_rows=30)
    progress.note(1_000_000)
    assert signs.progress() == "worker 1 is rebuilt from its peers' memory: 25 % of 4.0 MB"
    assert "rebuilt" not in caplog.text
    progress.end()
    assert signs.progress().startswith("worker 1 was rebuilt from its peers' memory: 30 rows in 0.")
    assert (metrics.rebuild_progress, metrics.rebuilds) == (1.0, 1)
    assert signs.progress() in caplog.text


def test_what_is_shown_is_written_once_per_percent(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(rebuild_progress, "show_progress", shown.append)
    progress = RebuildProgress(1, ParityMetrics())
    for _ in range(2):
        progress.begin(1_000_000, own_rows=30)
        for _ in range(1000):
            progress.note(1000)
    assert len(shown) == 2 * 101
    assert len(set(shown)) == 101


def test_a_survivor_counts_the_bytes_and_shows_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_ALIVE_FILE", str(tmp_path / "worker-0"))
    signs, metrics = SignsOfLife(tmp_path / "worker-0"), ParityMetrics()
    progress = RebuildProgress(0, metrics)
    progress.begin(4000)
    progress.note(3000)
    assert (metrics.rebuild_progress, signs.progress()) == (0.75, "")
    progress.end()
    assert signs.progress() == ""
