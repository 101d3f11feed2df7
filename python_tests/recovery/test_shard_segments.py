"""The live segments of a shard are opened once; what is damaged is recorded, and counts once."""

import pytest

from cpr_ext.errors import DamageError
from cpr_ext.recovery.findings import Findings
from cpr_ext.recovery.shard_segments import open_shard
from cpr_ext.storage.store_reader import StoreReader
from python_tests.helpers import flip
from python_tests.tools.maintenance.stores import trained_store


@pytest.fixture
def reader(tmp_path):
    trained_store(tmp_path, num_shards=2, snapshots=2).checkpointer.close()
    return StoreReader(tmp_path)


def opened(reader, num=None):
    findings, manifest = Findings(), reader.shards[1]
    ranges = {name: reader.row_range(name, 1) for name in reader.tables}
    return open_shard(manifest, manifest.segments[:num], ranges, findings, False), findings


def test_all_live_segments_are_opened_oldest_first(reader):
    shard, findings = opened(reader)
    records = list(reader.shards[1].segments)
    assert [usable.record for usable in shard.usable] == records
    assert [record.kind for record in records] == ["base", "partial", "partial"]
    assert shard.is_whole
    assert findings.damaged_segments == []


def test_only_the_segments_asked_for_are_opened(reader):
    records = reader.shards[1].segments
    shard, _ = opened(reader, num=2)
    assert [usable.record for usable in shard.usable] == list(records[:2])


def test_a_damaged_header_is_recorded_and_leaves_the_record_in_its_place(reader):
    record = reader.shards[1].segments[1]
    path = reader.shards[1].path_of(record)
    flip(path, 100)
    shard, findings = opened(reader)
    assert shard.found[1] == record
    assert len(shard.usable) == 2
    assert not shard.is_whole
    assert [(d.path, d.num_rows) for d in findings.damaged_segments] == [(path, -1)]


def test_without_a_base_rows_may_be_missing(reader):
    shard, _ = opened(reader)
    del shard.found[0]
    assert not shard.is_whole


def test_a_damaged_chunk_counts_once_however_often_it_is_met(reader):
    shard, findings = opened(reader)
    path = shard.usable[2].rows.segment.path
    for chunk in (0, 0, 1):
        shard.note_damage(findings, path, chunk, 5, DamageError("bad"))
    assert [usable.damaged for usable in shard.usable] == [set(), set(), {0, 1}]
    assert [d.num_rows for d in findings.damaged_segments] == [5, 5]
    assert findings.damaged_segments[0].reason == "chunk 0: bad"
    assert not shard.is_whole
