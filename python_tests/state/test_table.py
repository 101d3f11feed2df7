"""What a table is: found in any module, with the state that belongs to its rows."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.state.table import (
    Table,
    find_tables,
    prioritized_tables,
    register_tables,
    shard_row_range,
)
from python_tests.helpers import STILL_OPTIMIZERS, TABLE_OPTIMIZERS, build, make_indices, train_step


def test_tables_are_found_by_module_name_in_order_with_their_optimizers():
    model = nn.ModuleDict(
        {
            "users": nn.Embedding(10, 2),
            "tower": nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 1)),
        }
    )
    users = torch.optim.SGD(model["users"].parameters(), lr=0.1)
    found = find_tables(model, [users])
    assert [(t.name, t.num_embeddings, t.embedding_dim) for t in found] == [
        ("users", 10, 2),
        ("tower.0", 5, 3),
    ]
    assert found[0].optimizer is users
    assert found[1].optimizer is None
    assert find_tables(nn.Linear(2, 2)) == []


def test_registered_tables_are_tensors_or_modules_by_name():
    weight, module = nn.Parameter(torch.zeros(4, 2)), nn.Embedding(5, 2)
    tables = register_tables({"w": weight, "m": module}, [])
    assert [(table.name, table.modules) for table in tables] == [("w", []), ("m", [module])]
    with pytest.raises(UsageError, match="'x' is a list; needed: tensor or module"):
        register_tables({"x": [1]}, [])
    twice = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(UsageError, match="updated by two optimizers"):
        find_tables(module, twice)


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (torch.zeros(0, 3), r"'t' has shape \(0, 3\)"),
        (torch.zeros(3, 0), r"'t' has shape \(3, 0\)"),
        (torch.zeros(3), r"'t' has shape \(3,\)"),
        (torch.zeros(3, 4).T, "'t' is not contiguous"),
        (torch.zeros(3, 4, dtype=torch.complex64), "dtype torch.complex64; can be stored: float64"),
    ],
)
def test_a_weight_that_is_no_table_is_refused_with_what_is_wrong(weight, told):
    with pytest.raises(UsageError, match=told):
        Table("t", weight)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("sgd", set()),
        ("sgd_momentum", {"momentum_buffer"}),
        ("adagrad", {"sum"}),
        ("adam", {"exp_avg", "exp_avg_sq"}),
        ("sparse_adam", {"exp_avg", "exp_avg_sq"}),
        ("rowwise_adagrad", {"sum"}),
    ],
)
def test_the_state_of_rows_is_found_and_step_counters_are_not_taken_for_it(optimizer, states):
    model, optimizers = build({"one": (1, 2), "many": (30, 2)}, optimizer)
    generator = torch.Generator().manual_seed(0)
    train_step(model, optimizers, make_indices(model, generator, 5), generator)
    for table in find_tables(model, optimizers):
        assert set(table.row_states()) == states
        assert set(table.arrays()) == {"weight", *states}
        assert table.array_names() == sorted(table.arrays())
        assert all(len(array) == table.num_embeddings for array in table.arrays().values())


@pytest.mark.parametrize("optimizer", sorted(TABLE_OPTIMIZERS))
def test_what_is_said_of_untouched_rows_is_what_the_optimizer_does(optimizer):
    model, optimizers = build({"a": (200, 3)}, optimizer)
    (table,) = find_tables(model, optimizers)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        train_step(model, optimizers, make_indices(model, generator, 50), generator)
    before = {name: array.clone() for name, array in table.arrays().items()}
    train_step(model, optimizers, {"a": torch.tensor([7])}, generator)
    untouched = torch.arange(200) != 7
    kept = all(
        torch.equal(array[untouched], before[name][untouched])
        for name, array in table.arrays().items()
    )
    assert kept == table.updates_only_looked_up_rows() == (optimizer in STILL_OPTIMIZERS)


def test_weight_decay_and_unknown_optimizers_are_taken_to_move_every_row():
    class Own(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    class Sub(torch.optim.SGD):
        pass

    for make in (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), Own, Sub):
        model = nn.Embedding(4, 2)
        (table,) = find_tables(model, [make(model.parameters())])
        assert not table.updates_only_looked_up_rows()
    (table,) = find_tables(nn.Embedding(4, 2))
    assert table.updates_only_looked_up_rows()


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shards_cut_a_table_into_ranges_that_meet_and_are_of_nearly_equal_size(rows, num_shards):
    ranges = [shard_row_range(rows, shard, num_shards) for shard in range(num_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    sizes = [end - begin for begin, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30))
def test_the_prioritised_tables_are_the_fewest_largest_that_hold_99_percent(sizes):
    tables = [SimpleNamespace(name=str(i), num_embeddings=rows) for i, rows in enumerate(sizes)]
    chosen = prioritized_tables(tables)
    held = sum(table.num_embeddings for table in chosen)
    assert held >= 0.99 * sum(sizes)
    assert held - chosen[-1].num_embeddings < 0.99 * sum(sizes)
    others = [table.num_embeddings for table in tables if table not in chosen]
    assert not others or max(others) <= min(table.num_embeddings for table in chosen)


# --- tables of which a module keeps newer rows in a cache ---


class Model(nn.Module):
    """With what FBGEMM's TBE shows of its memory: two tables in one piece, and a cache of rows."""

    def __init__(self, cached_rows):
        super().__init__()
        self.kernel, self.dense = nn.Module(), nn.Linear(4, 1)
        self.kernel.register_buffer("weights_uvm", torch.zeros(2 * 50 * 4))
        self.kernel.register_buffer("lxu_cache_weights", torch.zeros(cached_rows, 4))


def make(directory, cached_rows, tables=None):
    model = Model(cached_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = tables or dict(zip("ab", model.kernel.weights_uvm.view(2, 50, 4), strict=True))
    return cpr_ext.Checkpointer(model, optimizer, directory, tables=named)


def test_a_table_with_a_cache_is_refused_by_name_and_one_without_or_elsewhere_is_not(tmp_path):
    with pytest.raises(UsageError, match=r"table 'a': Module 'kernel' caches its rows.*DEVICE"):
        make(tmp_path / "s", 8)
    assert not (tmp_path / "s").exists()
    make(tmp_path / "a", 0).close()
    make(tmp_path / "b", 8, {"elsewhere": torch.zeros(50, 4)}).close()
