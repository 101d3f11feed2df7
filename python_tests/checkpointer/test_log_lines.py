"""What a run logs: one line for each durable snapshot and each recovery, by the part's logger."""

import logging

import cpr_ext
from python_tests.helpers import Trained


def test_each_snapshot_and_each_recovery_is_one_line_with_its_numbers(tmp_path, caplog):
    """Also in a store whose path is no text."""
    caplog.set_level(logging.INFO, "cpr_ext")
    schedule = cpr_ext.EverySteps(2)
    run = Trained(tmp_path / "st\udcffore", {"a": (60, 2)}, schedule=schedule, num_shards=2)
    for _ in range(2):
        run.train(2)
        run.checkpointer.wait()
    run.checkpointer.recover(shards=[1])
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    saved = [text for name, text in lines if name == "cpr_ext.saving" and "durable" in text]
    expected = ["snapshot 1 is durable: base", "snapshot 2 is durable: partial"]
    assert [text.split(",")[0] for text in saved] == expected
    assert "of step 1" in saved[0]
    (recovered,) = [text for name, text in lines if name == "cpr_ext.recovery"]
    assert recovered.startswith("recovered shards 1 at step 4: 30 rows in ")
    run.checkpointer.recover()
    run.checkpointer.close()
    caplog.text.encode()
    assert "st\\udcffore" in caplog.text
