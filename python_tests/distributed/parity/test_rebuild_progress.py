"""What a rebuild counts on its way, and says at its end."""

import logging

from cpr_ext.distributed.parity.rebuild_progress import RebuildProgress
from cpr_ext.saving.metrics import ParityMetrics


def test_a_worker_counts_how_far_its_rows_are_rebuilt_and_says_when_they_are(caplog):
    caplog.set_level(logging.INFO)
    metrics = ParityMetrics()
    progress = RebuildProgress(1, metrics)
    progress.begin(4_000_000, own_rows=30)
    progress.note(1_000_000)
    assert (metrics.rebuild_progress, caplog.text) == (0.25, "")
    progress.end()
    assert "worker 1 was rebuilt from its peers' memory: 30 rows in 0." in caplog.text
    assert (metrics.rebuild_progress, metrics.rebuilds) == (1.0, 1)


def test_a_survivor_counts_the_bytes_and_says_nothing(caplog):
    caplog.set_level(logging.INFO)
    metrics = ParityMetrics()
    progress = RebuildProgress(0, metrics)
    progress.begin(4000)
    progress.note(3000)
    assert metrics.rebuild_progress == 0.75
    progress.end()
    assert caplog.text == ""
