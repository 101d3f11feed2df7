import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpr_ext
from cpr_ext.errors import RowIndexError
from cpr_ext.wings.tools.maintenance import read_rows
from python_tests.helpers import Trained, same_bits
from python_tests.wings.tools.maintenance.stores import TABLES, recovered


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


def test_no_rows_give_empty_arrays_and_rows_that_the_table_lacks_are_refused(store):
    found = read_rows(store, "tables.mid", torch.empty(0, dtype=torch.int64))
    assert found.arrays["weight"].shape == (0, 3)
    assert found.arrays["sum"].dtype == torch.float32
    for row in (-1, 700):
        with pytest.raises(RowIndexError, match=f"row {row} of 'tables.big'"):
            read_rows(store, "tables.big", [0, row])


def test_a_step_is_that_of_the_row(tmp_path):
    run = Trained(
        tmp_path / "store",
        {"a": (60, 2)},
        num_shards=2,
        schedule=cpr_ext.EverySteps(2),
        priority=cpr_ext.MostFrequentlyUsed(0.3),
        store=cpr_ext.StoreOptions(None),
    )
    weights = {}
    for step in range(1, 31):
        run.train(1)
        weights[step] = run.checkpointer.tables[0].weight.detach().clone()
        run.checkpointer.wait()
        if step < 2:
            continue
        rows = read_rows(tmp_path / "store", "tables.a", range(60))
        for row in range(60):
            same = [s for s in weights if torch.equal(weights[s][row], rows.arrays["weight"][row])]
            assert int(rows.steps[row]) in same
    run.checkpointer.close()
