"""Two processes with a part of the tables each: what they save, recover, and cut anew."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from cpr_ext.errors import StoreError
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import export, read_rows, verify
from python_tests.integrations.sharded_models import (
    NAMES,
    PLANS,
    copy_parts,
    lookups_of,
    same_tables,
    sharded,
    whole_tables,
)
from python_tests.integrations.two_rank_job import CASES, SAVED_STEPS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def job(tmp_path_factory, run_ranks):
    """The directory of a job of two ranks that has ended."""
    directory = tmp_path_factory.mktemp("two-ranks")
    run_ranks("python_tests.integrations.two_rank_job", directory, 2)
    return directory


def results(job, plan):
    return [torch.load(job / f"{plan}-{rank}.pt", weights_only=False) for rank in range(2)]


def together(job, plan, what):
    return whole_tables([part for result in results(job, plan) for part in result[what]])


@pytest.mark.parametrize("plan", PLANS)
def test_every_rank_recovers_its_rows_and_dense_part_bit_for_bit(job, plan):
    for result in results(job, plan):
        assert result["step"] == SAVED_STEPS
        trained, recovered = result["trained"], result["recovered"]
        assert [part for part, _ in trained] == [part for part, _ in recovered]
        for (_, before), (_, after) in zip(trained, recovered, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert result["dense"].keys() == result["recovered_dense"].keys() >= {"linear.weight"}
        for name, value in result["dense"].items():
            assert torch.equal(value, result["recovered_dense"][name])


@pytest.mark.parametrize("plan", PLANS)
def test_the_parts_of_all_ranks_make_up_the_tables(job, plan):
    for name, arrays in together(job, plan, "trained").items():
        assert name in NAMES.values()
        assert not any(array.isnan().any() for array in arrays.values())


@pytest.mark.parametrize("plan", PLANS)
def test_each_rank_counts_the_lookups_of_all_ranks_in_its_rows(job, plan):
    # The base at step 1 took the first step's lookups.
    expected = lookups_of(range(1, SAVED_STEPS), world_size=2)
    seen = 0
    for result in results(job, plan):
        for part, counts in result["counts"]:
            (table,) = (table for table, name in NAMES.items() if name == part.table)
            assert torch.equal(counts, expected[table][slice(*part.rows)]), part
            seen += 1
    assert seen >= len(NAMES)


@pytest.mark.parametrize("plan", PLANS)
def test_the_stores_of_both_ranks_are_recovered_into_another_plan(job, plan):
    trained = together(job, plan, "trained")
    regrouped = together(job, plan, "regrouped")
    assert same_tables(trained, regrouped)
    for result in results(job, plan):
        for name, value in results(job, plan)[0]["dense"].items():
            assert torch.equal(value, result["regrouped_dense"][name])


@pytest.mark.parametrize("plan", PLANS)
def test_the_stores_of_both_ranks_are_recovered_by_one(job, plan, alone, tmp_path):
    fused, _ = CASES[plan]
    stores = [job / plan / f"rank-{rank}" for rank in range(2)]
    # A rank alone has whole rows, unless its plan cuts them; then their state is cut alike.
    parallel, optimizer = sharded("column_wise" if plan == "column_wise" else "row_wise", fused)
    with make_checkpointer(parallel, optimizer, tmp_path / "new") as checkpointer:
        checkpointer.recover(from_store=stores)
        found = whole_tables(copy_parts(checkpointer.tables))
    # The job has trained a step more since, but saved nothing of it.
    assert same_tables(found, together(job, plan, "trained"))


def test_a_store_that_is_left_out_is_missed(job, alone, tmp_path):
    parallel, optimizer = sharded("row_wise", "rowwise_adagrad")
    with make_checkpointer(parallel, optimizer, tmp_path / "new") as checkpointer:
        before = copy_parts(checkpointer.tables)
        with pytest.raises(StoreError, match="is not, or not as a whole, in the stores"):
            checkpointer.recover(from_store=[job / "row_wise" / "rank-0"])
        for (_, arrays), table in zip(before, checkpointer.tables, strict=True):
            assert torch.equal(arrays["weight"], table.weight)


def test_the_same_store_twice_is_refused(job, alone, tmp_path):
    stores = [job / "row_wise" / f"rank-{rank}" for rank in (0, 1, 1)]
    parallel, optimizer = sharded("row_wise", "rowwise_adagrad")
    with make_checkpointer(parallel, optimizer, tmp_path / "new") as checkpointer:
        with pytest.raises(StoreError, match="is in two of the stores"):
            checkpointer.recover(from_store=stores)


def test_a_rank_cannot_open_the_store_of_another(job, alone):
    parallel, optimizer = sharded("row_wise", "rowwise_adagrad")
    with pytest.raises(StoreError, match="holds another model"):
        make_checkpointer(parallel, optimizer, job / "row_wise" / "rank-1")


def test_a_store_tells_which_part_of_each_table_it_holds(job):
    for rank in range(2):
        for table in StoreReader(job / "row_wise" / f"rank-{rank}").tables.values():
            assert isinstance(table.part, TablePart)
            assert table.name == table.part.name
            assert table.part.rows[0] == rank * -(-table.part.num_embeddings // 2)


def test_every_tool_reads_the_store_of_a_rank(job, tmp_path):
    stores = [job / "mixed" / f"rank-{rank}" for rank in range(2)]
    for store, result in zip(stores, results(job, "mixed"), strict=True):
        assert verify(store).damaged == []
        for part, arrays in result["trained"]:
            rows = read_rows(store, part.name, range(part.shape[0]))
            assert all(torch.equal(rows.arrays[name], array) for name, array in arrays.items())
        export(store, tmp_path / store.name)
        exported = load_file(tmp_path / store.name / "model.safetensors")
        for part, arrays in result["trained"]:
            assert torch.equal(exported[f"{part.name}.weight"], arrays["weight"])
        assert torch.equal(exported["linear.weight"], result["dense"]["linear.weight"])
