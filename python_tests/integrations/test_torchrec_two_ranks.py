"""Processes with a part of the tables each: what they save, recover, and export."""

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from cpr_ext.distributed import worker_directory
from cpr_ext.errors import StoreError
from cpr_ext.storage.store_reader import StoreReader
from cpr_ext.wings.tools.maintenance import export, read_rows, verify, verify_job
from python_tests.distributed.losses import long
from python_tests.helpers import assert_same
from python_tests.integrations.sharded_job import SAVED_STEPS, under_each_plan
from python_tests.integrations.sharded_models import (
    NAMES,
    PLANS,
    SmallDlrm,
    lookups_of,
    opened,
    sharded,
    whole_tables,
)


@pytest.fixture(scope="module", params=[2, long(3), long(4)])
def job(request, tmp_path_factory, ranks):
    """What each rank of a job found that has ended, and their stores by plan."""
    directory, size = tmp_path_factory.mktemp("ranks"), request.param
    found = ranks.run(under_each_plan, directory, size)
    return found, lambda plan: [worker_directory(directory / plan, n, size) for n in range(size)]


@pytest.mark.parametrize("plan", PLANS)
def test_each_rank_recovers_its_rows_and_counts_the_lookups_of_all_ranks_in_them(job, plan):
    # The base at step 1 took the first step's lookups.
    expected = lookups_of(range(1, SAVED_STEPS), world_size=len(job[0]))
    seen = 0
    for result in (result[plan] for result in job[0]):
        assert result["step"] == SAVED_STEPS
        assert_same(result["recovered"], result["trained"])
        assert result["trained"][1].keys() >= {"linear.weight"}
        for part, counts in result["counts"]:
            (table,) = (table for table, name in NAMES.items() if name == part.table)
            assert torch.equal(counts, expected[table][slice(*part.rows)]), part
            seen += 1
    assert seen >= len(NAMES)


@pytest.mark.parametrize("plan", PLANS)
def test_a_job_is_exported_as_the_gathered_model_bit_for_bit(job, plan, tmp_path):
    results, stores = [result[plan] for result in job[0]], job[1](plan)
    report = export(stores[0].parent, tmp_path / "out")
    assert len(report.stores) == len(results)
    assert (report.step, report.notes) == (SAVED_STEPS, ())
    model = load_file(tmp_path / "out" / "model.safetensors")
    rows = load_file(tmp_path / "out" / "optimizer_rows.safetensors")
    tables = whole_tables([part for result in results for part in result["trained"][0]])
    assert not any(array.isnan().any() for table in tables.values() for array in table.values())
    expected = {f"{name}.weight": arrays["weight"] for name, arrays in tables.items()}
    assert_same(model, {**results[0]["trained"][1], **expected})
    assert expected.keys() == {f"{name}.weight" for name in NAMES.values()}
    for name, arrays in tables.items():
        for state in arrays.keys() - {"weight"}:
            assert torch.equal(rows.pop(exported_name(name, state, arrays)), arrays[state])
    assert not rows
    plain = SmallDlrm()
    plain.load_state_dict(model, strict=True)
    assert_same(dict(plain.state_dict()), model)
    assert verify_job(stores[0].parent).is_sound


def exported_name(name, state, arrays):
    """``sum[0:8]`` of ``whole_tables`` is ``sum`` where that is of all columns."""
    is_whole = state.endswith(f"[0:{arrays['weight'].shape[1]}]")
    return f"{name}.weight.{state.partition('[')[0] if is_whole else state}"


def test_stores_that_do_not_make_up_the_tables_are_refused_and_change_nothing(job, alone, tmp_path):
    stores = job[1]("row_wise")
    parallel, optimizer = sharded("row_wise", "rowwise_adagrad")
    with pytest.raises(StoreError, match="holds another model"):
        opened(parallel, optimizer, stores[1])
    with opened(parallel, optimizer, tmp_path / "new") as checkpointer:
        before = [table.weight.clone() for table in checkpointer.tables]
        for given, says in (
            (stores[:1], "is not, or not as a whole, in the stores"),
            ([*stores, stores[1]], "is in two of the stores"),
        ):
            with pytest.raises(StoreError, match=says):
                checkpointer.recover(from_store=given)
        assert all(map(torch.equal, before, [table.weight for table in checkpointer.tables]))


def test_every_tool_reads_the_store_of_a_rank(job, tmp_path):
    for store, result in zip(job[1]("mixed"), job[0], strict=True):
        parts, dense = result["mixed"]["trained"]
        assert {t.part: t.name for t in StoreReader(store).tables.values()} == {
            part: part.name for part, _ in parts
        }
        assert verify(store).damaged == []
        export(store, tmp_path / store.name)
        exported = load_file(tmp_path / store.name / "model.safetensors")
        for part, arrays in parts:
            rows = read_rows(store, part.name, range(part.shape[0]))
            assert all(torch.equal(rows.arrays[name], array) for name, array in arrays.items())
            assert torch.equal(exported[f"{part.name}.weight"], arrays["weight"])
        assert torch.equal(exported["linear.weight"], dense["linear.weight"])
