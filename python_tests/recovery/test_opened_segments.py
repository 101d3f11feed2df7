"""Live segments are opened once; what is damaged is recorded, and counts once."""

import pytest

from cpr_ext.errors import DamageError
from cpr_ext.recovery.damage_accounting import open_up_to
from cpr_ext.recovery.report import Findings
from cpr_ext.storage.store_reader import StoreReader
from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture
def reader(tmp_path):
    trained_store(tmp_path, num_shards=2, snapshots=2).checkpointer.close()
    return StoreReader(tmp_path)


def test_a_damaged_chunk_counts_once_however_often_it_is_met(reader):
    findings = Findings()
    opened = open_up_to(reader, 99, findings, direct_io=False)
    path = opened.usable[2].rows.segment.path
    for chunk in (0, 0, 1):
        opened.note_damage(findings, path, chunk, 5, DamageError("bad"))
    assert [usable.damaged for usable in opened.usable] == [set(), set(), {0, 1}]
    assert [d.num_rows for d in findings.damaged_segments] == [5, 5]
    assert findings.damaged_segments[0].reason == "chunk 0: bad"
    assert not opened.is_whole
