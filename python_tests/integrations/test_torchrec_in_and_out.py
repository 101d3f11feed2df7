"""TorchRec jobs that come from its own checkpoints, and go back to them."""

import pytest

pytest.importorskip("torchrec", reason="TorchRec is not installed: see docs/torchrec.md")

from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import cpr_ext
from cpr_ext.wings.tools.maintenance import export, import_checkpoint
from python_tests.helpers import assert_same
from python_tests.integrations.sharded_models import (
    ALONE,
    SmallDlrm,
    dense_of,
    held,
    opened,
    same_tables,
    sharded,
    train,
)

pytestmark = ALONE
STEPS = 4


def moments(optimizer):
    return str(optimizer.optimizers[-1][1].state_dict())


def trained(directory, plan="mixed", fused="rowwise_adagrad"):
    parallel, optimizer = sharded(plan, fused)
    with opened(parallel, optimizer, directory, save_at_close=True) as ckpt:
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
    with opened(other, others, tmp_path / "new") as ckpt:
        ckpt.adopt(step=STEPS)
        assert same_tables(held(ckpt), tables)
    assert_same(dense_of(other), dense_of(parallel))
    assert moments(others) == moments(optimizer)


@pytest.mark.parametrize("plan", ["mixed", "row_wise"])
def test_a_checkpoint_of_torchrec_is_imported(tmp_path, plan):
    """With its state, unless a table was cut by columns: then it has state for each range."""
    parallel, optimizer, tables = trained(tmp_path / "store", plan)
    save_dcp(checkpoint_of(parallel, optimizer), checkpoint_id=tmp_path / "dcp")
    import_checkpoint(tmp_path / "dcp", tmp_path / "imported", step=STEPS)
    other, others = sharded("table_wise", "rowwise_adagrad", seed=1)
    with opened(other, others, tmp_path / "new") as ckpt:
        strict = plan == "row_wise"
        report = ckpt.recover(from_store=[tmp_path / "imported"], strict=strict)
        assert report.step == STEPS
        found = held(ckpt)
    if strict:
        assert report.differences == []
        assert same_tables(found, tables)
    assert {name: arrays["weight"].tolist() for name, arrays in found.items()} == {
        name: arrays["weight"].tolist() for name, arrays in tables.items()
    }
    assert_same(dense_of(other), dense_of(parallel))
    assert moments(others) == moments(optimizer)


def test_the_unsharded_model_is_loaded_for_evaluation(tmp_path):
    parallel, _, tables = trained(tmp_path / "store", "row_wise")
    plain = SmallDlrm()
    report = cpr_ext.load_into(plain, [tmp_path / "store"])
    assert (report.step, report.differences) == (STEPS, [])
    weights = {f"{name}.weight": arrays["weight"] for name, arrays in tables.items()}
    assert_same(dict(plain.state_dict()), {**dense_of(parallel), **weights})
