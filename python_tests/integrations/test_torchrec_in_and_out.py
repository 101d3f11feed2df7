"""TorchRec jobs that come from its own checkpoints, and go back to them."""

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.wings.tools.maintenance import export, import_checkpoint
from python_tests.integrations.sharded_models import (
    SmallDlrm,
    copy_parts,
    same_tables,
    sharded,
    train,
    whole_tables,
)

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's and FBGEMM's own, by the dozen
]
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
STEPS = 4


def held(ckpt):
    return whole_tables(copy_parts(ckpt.tables))


def moments(optimizer):
    return str(optimizer.optimizers[-1][1].state_dict())


def dense(parallel):
    return [p.detach().clone() for p in parallel.module.linear.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


def trained(directory, plan="mixed", fused="rowwise_adagrad"):
    parallel, optimizer = sharded(plan, fused)
    with make_checkpointer(parallel, optimizer, directory, **OPTIONS) as ckpt:
        train(parallel, optimizer, ckpt, STEPS)
        return parallel, optimizer, held(ckpt)


def checkpoint_of(parallel, optimizer):
    return {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("fused", ["rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_an_export_is_loaded_by_a_torchrec_job(tmp_path, plan, fused):
    parallel, optimizer, tables = trained(tmp_path / "store", "row_wise", fused)
    export(tmp_path / "store", tmp_path / "out", format="torchrec")
    other, others = sharded(plan, fused, seed=1)
    train(other, others, None, 1)  # TorchRec's optimizers load into state that is there
    state = checkpoint_of(other, others)
    load_dcp(state, checkpoint_id=tmp_path / "out")
    other.load_state_dict(state["model"])
    others.load_state_dict(state["optimizer"])
    with make_checkpointer(other, others, tmp_path / "new", **OPTIONS) as ckpt:
        ckpt.adopt(step=STEPS)
        assert same_tables(held(ckpt), tables)
    assert same(dense(other), dense(parallel))
    assert moments(others) == moments(optimizer)


def test_a_checkpoint_of_torchrec_is_imported(tmp_path):
    parallel, optimizer, tables = trained(tmp_path / "store")
    save_dcp(checkpoint_of(parallel, optimizer), checkpoint_id=tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "imported", step=STEPS)
    other, others = sharded("table_wise", "rowwise_adagrad", seed=1)
    with make_checkpointer(other, others, tmp_path / "new", **OPTIONS) as ckpt:
        # A column-wise table of the plan has state for each range of columns.
        report = ckpt.recover(from_store=[tmp_path / "imported"], strict=False)
        assert report.step == STEPS
        found = held(ckpt)
    assert found.keys() == tables.keys()
    for name, arrays in found.items():
        assert torch.equal(arrays["weight"], tables[name]["weight"])
    assert same(dense(other), dense(parallel))
    assert moments(others) == moments(optimizer)


def test_a_checkpoint_of_whole_rows_is_imported_with_its_state(tmp_path):
    parallel, optimizer, tables = trained(tmp_path / "store", "row_wise")
    save_dcp(checkpoint_of(parallel, optimizer), checkpoint_id=tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "imported", step=STEPS)
    other, others = sharded("table_wise", "rowwise_adagrad", seed=1)
    with make_checkpointer(other, others, tmp_path / "new", **OPTIONS) as ckpt:
        report = ckpt.recover(from_store=[tmp_path / "imported"])
        assert (report.step, report.differences) == (STEPS, [])
        assert same_tables(held(ckpt), tables)
    assert moments(others) == moments(optimizer)


def test_the_unsharded_model_is_loaded_for_evaluation(tmp_path):
    parallel, _, tables = trained(tmp_path / "store", "row_wise")
    plain = SmallDlrm()
    report = cpr_ext.load_into(plain, [tmp_path / "store"])
    assert (report.step, report.differences) == (STEPS, [])
    values = plain.state_dict()
    for name, arrays in tables.items():
        assert torch.equal(values[f"{name}.weight"], arrays["weight"])
    assert same(plain.linear.parameters(), dense(parallel))
