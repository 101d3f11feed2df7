"""What is said of protection by parity: never more than is true."""

import pytest

from cpr_ext.saving import metrics as saving_metrics
from cpr_ext.saving.metrics import ParityMetrics


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(saving_metrics.time, "perf_counter", lambda: now[0])
    return now


def test_nobody_is_protected_before_the_parity_is_encoded_or_after_it_is_gone(clock):
    metrics = ParityMetrics()
    assert not metrics.protected
    metrics.begin_sending(7)
    assert (metrics.protected, metrics.lag_steps) == (False, 0)
    metrics.note_protected()
    metrics.completed_step, metrics.bytes_sent = 9, 600
    clock[0] += 3.0
    assert (metrics.protected, metrics.lag_steps, metrics.bytes_per_second) == (True, 2, 200.0)
    metrics.note_acknowledged(9, 300)
    assert (metrics.lag_steps, metrics.bytes_per_second) == (0, 300.0)
    metrics.note_unprotected()
    assert (metrics.protected, metrics.lag_steps, metrics.bytes_per_second) == (False, 0, 0.0)
    clock[0] += 5.0
    metrics.begin_sending(9)
    metrics.note_protected()
    assert metrics.bytes_per_second == 0.0


def test_a_rebuild_is_done_only_when_it_ends():
    metrics = ParityMetrics()
    assert metrics.rebuild_progress == 1.0  # there is none
    metrics.begin_rebuild(400)
    seen = [metrics.rebuild_progress]
    for num_bytes in (100, 200):
        metrics.note_rebuilt(num_bytes)
        seen.append(metrics.rebuild_progress)
    assert (seen, metrics.rebuilds) == ([0.0, 0.25, 0.75], 0)
    metrics.end_rebuild()
    assert (metrics.rebuild_progress, metrics.rebuilds) == (1.0, 1)
