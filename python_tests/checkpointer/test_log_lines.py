"""What a run logs: one line for each durable snapshot and each recovery, by the part's logger."""

import logging

import cpr_ext
from python_tests.helpers import Trained


def test_each_snapshot_and_each_recovery_is_one_line_with_its_numbers(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpr_ext")
    run = Trained(tmp_path / "store", {"a": (60, 2)}, schedule=cpr_ext.EverySteps(2), num_shards=2)
    for _ in range(2):
        run.train(2)
        run.checkpointer.wait()
    run.checkpointer.recover(shards=[1])
    run.checkpointer.close()
    lines = [(record.name, record.getMessage()) for record in caplog.records]
    saved = [text for name, text in lines if name == "cpr_ext.saving" and "durable" in text]
    assert [text.split(",")[0] for text in saved] == [
        "snapshot 1 is durable: base",
        "snapshot 2 is durable: partial",
    ]
    assert "of step 1" in saved[0]
    (recovered,) = [text for name, text in lines if name == "cpr_ext.recovery"]
    assert recovered.startswith("recovered shards 1 at step 4: 30 rows in ")


def test_a_path_that_is_no_text_can_be_logged_by_each_part(tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpr_ext")
    run = Trained(tmp_path / "st\udcffore", {"a": (60, 2)})
    run.train(1)
    run.checkpointer.save("base")
    run.checkpointer.wait()
    run.checkpointer.recover()
    run.checkpointer.close()
    caplog.text.encode()
    assert "st\\udcffore" in caplog.text
