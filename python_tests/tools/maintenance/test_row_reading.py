import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext.errors import DamageError, RowIndexError, StoreError, UsageError
from cpr_ext.storage.segment_reader import SegmentRows
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.tools.maintenance import inspect_table, read_rows
from python_tests.helpers import Trained, flip, read_chunks, same_bits, shard_records
from python_tests.tools.maintenance.stores import TABLES, recovered, trained_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory).checkpointer.close()
    return directory


@pytest.fixture(scope="module")
def expected(store):
    return recovered(store)[1]


@given(data=st.data(), table=st.sampled_from(sorted(TABLES)))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_rows_in_any_order_are_as_recovery_restores_them(store, expected, data, table):
    rows, table = TABLES[table][0], f"tables.{table}"
    row_ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=40))
    found = read_rows(store, table, row_ids)
    assert found.row_ids.tolist() == row_ids
    assert found.arrays.keys() == expected[table].keys()
    for name, values in found.arrays.items():
        assert same_bits(values, expected[table][name][row_ids])


def test_each_row_comes_with_the_step_at_which_it_was_captured(tmp_path):
    trained = trained_store(tmp_path / "store")
    newest = {}
    for _, _, path in shard_records(trained.store):
        for chunk in read_chunks(path):
            if chunk.table == "tables.big":
                newest.update(dict.fromkeys(chunk.row_ids.tolist(), chunk.step))
    trained.checkpointer.close()
    steps = read_rows(tmp_path / "store", "tables.big", range(700)).steps.tolist()
    assert steps == [newest[row] for row in range(700)]
    assert len(set(steps)) > 2


def test_only_chunks_that_hold_a_wanted_row_are_read(store, monkeypatch):
    read = []
    rows_of = SegmentRows.rows
    monkeypatch.setattr(SegmentRows, "rows", lambda s, c: read.append((s, c)) or rows_of(s, c))
    read_rows(store, "tables.big", [699])
    for segment, chunk in read:
        begin, end = segment.span(chunk)
        assert begin <= 699 < end
    assert 1 <= len(read) <= 2


def test_damage_elsewhere_does_not_matter_and_damage_here_is_named(tmp_path, expected):
    trained_store(tmp_path / "store").checkpointer.close()
    reader = StoreReader(tmp_path / "store")
    base = reader.live(2, 10**9)[0]
    last = reader.shards[2].path_of(base)
    flip(last, base.header_bytes + 16)
    first_shard = list(range(200))
    found = read_rows(tmp_path / "store", "tables.big", first_shard)
    assert same_bits(found.arrays["weight"], expected["tables.big"]["weight"][first_shard])
    with pytest.raises(DamageError, match=last.name):
        read_rows(tmp_path / "store", "tables.big", range(467, 700))


@pytest.mark.parametrize("row", [-1, 700])
def test_a_row_that_the_table_does_not_have_is_refused(store, row):
    with pytest.raises(RowIndexError, match=f"row {row} of 'tables.big'"):
        read_rows(store, "tables.big", [0, row])


def test_an_unknown_table_is_refused_with_the_tables_there_are(store):
    with pytest.raises(UsageError, match=r"'none'.*tables.big, tables.mid, tables.small"):
        read_rows(store, "none", [0])


def test_a_directory_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="not a cpr_ext store"):
        read_rows(tmp_path, "big", [0])


def test_nothing_asked_for_gives_empty_arrays_of_the_right_kind(store):
    found = read_rows(store, "tables.mid", torch.empty(0, dtype=torch.int64))
    assert found.arrays["weight"].shape == (0, 3)
    assert found.arrays["sum"].dtype == torch.float32


def test_a_step_is_that_of_the_row_or_not_known_after_compaction(tmp_path):
    run = Trained(
        tmp_path / "store",
        {"a": (60, 2)},
        num_shards=2,
        schedule=cpr_ext.EverySteps(2),
        priority=cpr_ext.MostFrequentlyUsed(0.3),
        rebase_after=None,
        compaction=cpr_ext.CompactionOptions(after=0.5),
    )
    weights, merged = {}, 0
    for step in range(1, 31):
        run.train(1)
        weights[step] = run.checkpointer.tables[0].weight.detach().clone()
        run.checkpointer.wait()
        if step < 2:
            continue
        rows = read_rows(tmp_path / "store", "tables.a", range(60))
        for row in range(60):
            known, last = int(rows.steps[row]), int(rows.not_after[row])
            same = [s for s in weights if torch.equal(weights[s][row], rows.arrays["weight"][row])]
            assert known == -1 or known in same
            assert min(same) <= last
        details = inspect_table(tmp_path / "store", "tables.a")
        merged = max(merged, details.rows_merged)
        assert sum(details.rows_by_step.values()) + details.rows_merged == 60
    assert merged > 0
    run.checkpointer.close()
