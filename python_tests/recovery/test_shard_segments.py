"""The live segments of a shard are opened once; what is damaged is recorded, and counts once."""

import pytest

from cpr_ext.errors import DamageError
from cpr_ext.recovery.damage_accounting import open_shard
from cpr_ext.recovery.report import Findings
from cpr_ext.storage.store_reader import StoreReader
from python_tests.wings.tools.maintenance.stores import trained_store


@pytest.fixture
def reader(tmp_path):
    trained_store(tmp_path, num_shards=2, snapshots=2).checkpointer.close()
    return StoreReader(tmp_path)


def opened(reader, num=None):
    findings = Findings()
    records = reader.manifest.shards[1][:num]
    return open_shard(reader, 1, records, findings, False), findings


def test_a_damaged_chunk_counts_once_however_often_it_is_met(reader):
    shard, findings = opened(reader)
    path = shard.usable[2].rows.segment.path
    for chunk in (0, 0, 1):
        shard.note_damage(findings, path, chunk, 5, DamageError("bad"))
    assert [usable.damaged for usable in shard.usable] == [set(), set(), {0, 1}]
    assert [d.num_rows for d in findings.damaged_segments] == [5, 5]
    assert findings.damaged_segments[0].reason == "chunk 0: bad"
    assert not shard.is_whole
