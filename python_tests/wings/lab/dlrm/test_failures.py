"""Failures played on one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table, find_tables, shard_row_range
from cpr_ext.wings.lab.dlrm.failures import PlannedFailure, lose_shards, parse_failure
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.helpers import (
    TABLE_OPTIMIZERS,
    build,
    copy_rows,
    make_indices,
    same_bits,
    train_step,
)


@given(st.integers(1, 10**9), st.sets(st.integers(0, 7), min_size=1))
def test_a_planned_failure_is_read_as_it_is_written(step, shards):
    text = f"{step}:{'+'.join(map(str, shards))}"
    assert parse_failure(text, num_shards=8) == PlannedFailure(step, tuple(sorted(shards)))


def test_a_shard_named_twice_is_lost_once_and_any_other_form_is_refused():
    assert parse_failure("3:1+1+0", num_shards=2) == PlannedFailure(3, (0, 1))
    example = r"write STEP:SHARD\[\+SHARD\.\.\.\], for example 800:0"
    wrong = ["", "3", "3:", ":1", "3:1,2", "-1:0", "3:-1", "a:0", "3:0+", "\u0663:0"]
    refused = {**dict.fromkeys(wrong, example), "0:1": "steps count from 1"}
    for text, told in {**refused, "5:2": "no shard 2; with 2 shards"}.items():
        with pytest.raises(UsageError, match=told):
            parse_failure(text, num_shards=2)


@pytest.mark.parametrize("optimizer", sorted(TABLE_OPTIMIZERS))
def test_losing_shards_wipes_their_rows_and_states_and_nothing_else(optimizer):
    model, optimizers = build({"a": (20, 3), "b": (3, 2)}, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        train_step(model, optimizers, make_indices(model, generator, 30), generator)
    tables = find_tables(model, optimizers)
    before = copy_rows(tables)
    lost = lose_shards(tables, [1, 3], 4, torch.Generator().manual_seed(5))
    expected = 0
    for table in tables:
        for shard in range(4):
            begin, end = shard_row_range(table.num_embeddings, shard, 4)
            expected += (end - begin) * (shard in (1, 3))
            for name, now in table.arrays().items():
                then = before[table.name][name]
                if shard not in (1, 3):
                    assert same_bits(now[begin:end], then[begin:end])
                elif name == "weight":
                    assert (now[begin:end] != then[begin:end]).all()
                else:
                    assert not now[begin:end].any()
    assert lost == expected


@pytest.mark.parametrize("make", [torch.optim.Adagrad, RowWiseAdagrad])
def test_a_lost_accumulator_begins_anew_with_the_optimizers_first_value(make):
    weight = torch.nn.Parameter(torch.zeros(10, 2))
    optimizer = make([weight], lr=0.1, initial_accumulator_value=0.5)
    fresh = optimizer.state[weight]["sum"].clone()
    optimizer.state[weight]["sum"].add_(3)
    lose_shards([Table("a", weight, optimizer)], [0], 1, torch.Generator())
    assert same_bits(optimizer.state[weight]["sum"], fresh)
