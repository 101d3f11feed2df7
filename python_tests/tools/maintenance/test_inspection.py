import pytest

from cpr_ext.errors import StoreError, UsageError
from cpr_ext.tools.maintenance import inspect, inspect_table, read_rows
from python_tests.tools.maintenance.stores import TABLES, trained_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stores") / "store"
    trained_store(directory).checkpointer.close()
    return directory


def test_the_summary_tells_points_shards_tables_and_sizes(store):
    summary = inspect(store)
    assert summary.num_shards == 3
    assert [(p.step, p.is_full_recovery_point) for p in summary.points] == [(1, True), (13, False)]
    assert [p.num_samples for p in summary.points] == [10, 130]
    assert [(s.segments, s.base_step, s.newest_step) for s in summary.shards] == [(5, 1, 13)] * 3
    assert summary.file_bytes == sum(p.stat().st_size for p in store.rglob("*.safetensors"))
    by_name = {table.name: table for table in summary.tables}
    assert by_name.keys() == {f"tables.{name}" for name in TABLES}
    big = by_name["tables.big"]
    assert (big.num_embeddings, big.embedding_dim, big.dtype) == (700, 4, "F32")
    assert big.row_states == ("sum F32 4",)
    assert big.row_bytes == 32


def test_the_age_of_a_tables_rows_is_that_of_the_rows_themselves(store):
    details = inspect_table(store, "tables.big")
    steps = read_rows(store, "tables.big", range(700)).steps
    assert details.rows_by_step == {s: int((steps == s).sum()) for s in steps.unique().tolist()}
    behind = sorted(13 - step for step in steps.tolist())
    assert details.steps_behind[0] == behind[0]
    assert details.steps_behind[2] == behind[round(0.5 * 699)]
    assert details.steps_behind[4] == behind[-1] == 12


def test_unknown_tables_and_directories_are_refused(store, tmp_path):
    with pytest.raises(UsageError, match="no table 'x'"):
        inspect_table(store, "x")
    with pytest.raises(StoreError, match="not a cpr_ext store"):
        inspect(tmp_path)
