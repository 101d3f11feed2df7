"""Managed collisions on another number of ranks: each id's row goes to the rank that has it now."""

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from cpr_ext.wings.publishing import changed_rows
from python_tests.distributed.losses import long
from python_tests.integrations.managed_job import IDS, SLOTS, resharded, trained


@pytest.fixture(scope="module")
def stores_of(tmp_path_factory, ranks):
    """The stores of a job of so many ranks, by case."""
    known = {}

    def of(world_size, case):
        if world_size not in known:
            known[world_size] = tmp_path_factory.mktemp(f"old-{world_size}")
            ranks.run(trained, known[world_size], world_size)
        return [known[world_size] / f"{case}-{rank}" for rank in range(world_size)]

    return of


@pytest.fixture
def taken_over(stores_of, ranks, tmp_path):
    """What each rank of a new job has, and what the old stores hold."""

    def take(old, new, case="full", policy="lru", mode="full", *, strict=False):
        stores = stores_of(old, case)
        held = held_by(stores)
        ids = {name: [key for table, key in held if table == name] for name in SLOTS}
        given = ([*map(str, stores)], policy, mode, strict, ids)
        return ranks.run(resharded, tmp_path, new, *given), held

    return take


def held_by(stores):
    """Weight, states and scores by table and id, as consumers of the stores see them."""
    held = {}
    for store in stores:
        for batch in changed_rows(store, states=True):
            name = batch.table.partition("[")[0].rpartition(".")[2]
            for at, key in enumerate(batch.arrays["key"].tolist()):
                if key >= 0:
                    assert (name, key) not in held
                    held[name, key] = {n: a[at].tolist() for n, a in batch.arrays.items()}
    return held


def require_taken(results, held):
    """Each id is on its rank with its row, or left out with the lowest scores, and is found."""
    world_size = len(results)
    rows = {key: (rank, row) for rank, r in enumerate(results) for key, row in r["rows"].items()}
    assert sum(len(result["rows"]) for result in results) == len(rows)
    for (name, key), (rank, row) in rows.items():
        assert rank == key // -(-IDS // world_size)
        assert row == {n: held[name, key][n] for n in row}
    left_out = held.keys() - rows.keys()
    for name, slots in SLOTS.items():
        shard = -(-slots // world_size)
        for rank in range(world_size):
            own = [
                key for key in held if key[0] == name and key[1] // -(-IDS // world_size) == rank
            ]
            room = min(shard, slots - rank * shard) - 1
            kept = [held[key] for key in own if key in rows]
            assert len(kept) == min(room, len(own))
            score = min(n for n in held[own[0]] if n.startswith("key."))
            lowest = min(row[score] for row in kept)
            assert all(held[key][score] <= lowest for key in own if key in left_out)
    for result in results:
        assert result["error"] is None
        assert (result["rows_of_other_ids"], result["foreign"]) == (0, [])
        assert result["same_keys"]
        for name in SLOTS:
            found = dict(zip([k for t, k in held if t == name], result["found"][name], strict=True))
            assert all(
                found[key] == row["weight"] for (t, key), (_, row) in rows.items() if t == name
            )
            assert [s for s in result["segments"][name] if s >= 0] == segments(name, world_size)
    assert sum(len(result["differences"]) for result in results) >= bool(left_out)
    return left_out


def segments(name, world_size):
    shard = -(-SLOTS[name] // world_size)
    return [min(rank * shard, SLOTS[name]) for rank in range(world_size + 1)]


@pytest.mark.parametrize(
    ("old", "new"),
    [(2, 1), (1, 2), (2, 4), *(long(*pair) for pair in ((4, 2), (3, 4), (4, 3)))],
)
def test_a_full_recovery_gives_each_id_of_other_ranks_its_row(taken_over, old, new):
    results, held = taken_over(old, new)
    left_out = require_taken(results, held)
    assert old % new or not left_out
    assert new % old or left_out
    assert {result["step"] for result in results} == {46}
    assert {i for result in results for i in result["iterations"].values()} == {46}


@pytest.mark.parametrize(("case", "policy"), [("lfu", "lfu"), ("distance", "distance")])
def test_a_partial_recovery_takes_rows_by_id_too(taken_over, case, policy):
    results, held = taken_over(2, 1, case, policy, "partial")
    assert require_taken(results, held) == set()


def test_more_ids_than_slots_are_refused_on_all_ranks_unless_told_otherwise(taken_over):
    results, _ = taken_over(1, 2, strict=True)
    errors = [result["error"] or "" for result in results]
    assert all(errors)
    assert any("with the lowest key.last_access_iter are left out" in error for error in errors)
