"""What a recovery finds counts once, and is told while it reads."""

from cpr_ext.errors import DamageError
from cpr_ext.recovery import restore
from cpr_ext.recovery.damage_accounting import open_up_to
from cpr_ext.recovery.report import RecoveryReport
from cpr_ext.storage.store_reader import StoreReader
from python_tests.wings.tools.maintenance.stores import trained_store


def test_a_damaged_chunk_counts_once_however_often_it_is_met(tmp_path):
    trained_store(tmp_path, num_shards=2, snapshots=2).checkpointer.close()
    findings = RecoveryReport()
    opened = open_up_to(StoreReader(tmp_path), 99, findings, direct_io=False)
    path = opened.usable[2].rows.segment.path
    for chunk in (0, 0, 1):
        opened.note_damage(findings, path, chunk, 5, DamageError("bad"))
    assert [usable.damaged for usable in opened.usable] == [set(), set(), {0, 1}]
    assert [d.num_rows for d in findings.damaged_segments] == [5, 5]
    assert findings.damaged_segments[0].reason == "chunk 0: bad"
    assert not opened.is_whole


def test_a_line_every_ten_seconds_says_how_much_is_read_and_how_long_it_takes(monkeypatch, caplog):
    caplog.set_level("INFO", "cpr_ext.recovery")
    clock = [100.0]
    monkeypatch.setattr(restore.time, "monotonic", lambda: clock[0])
    note = restore.RecoveryProgress(80_000_000_000)
    for clock[0], gigabytes in [(109.9, 15), (110, 16), (119.9, 39), (120, 40), (130, 90)]:
        note(gigabytes * 10**9)
    assert caplog.messages[:2] == [
        "recovering: 16.0 of 80.0 GB are read, 1.60 GB/s, about 40 s to go",
        "recovering: 40.0 of 80.0 GB are read, 2.00 GB/s, about 20 s to go",
    ]
    assert caplog.messages[2].endswith("about 0 s to go")  # of what is read twice
