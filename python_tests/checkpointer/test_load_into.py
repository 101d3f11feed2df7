"""A model for evaluation takes what it computes with from a store; optimizers are not needed."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import StoreError
from python_tests.recovery.test_replicated_tables import (
    CUTS,
    KINDS,
    ROWS,
    Model,
    cut_job,
    save,
    whole_job,
)


@pytest.mark.parametrize("kind", [*KINDS, "one optimizer", "two stores"])
def test_a_store_is_loaded_without_optimizers(tmp_path, kind):
    if kind == "one optimizer":  # a table that the job replicates
        jobs, stores = [whole_job(tmp_path, "adam", one_optimizer=True)], [tmp_path]
    elif kind == "two stores":
        jobs, stores = cut_job(tmp_path, "adam", CUTS), [tmp_path / "0", tmp_path / "1"]
    else:
        jobs, stores = cut_job(tmp_path, kind, [(0, ROWS)]), [tmp_path / "0"]
    save(*jobs)
    model, state = Model(seed=5), torch.get_rng_state()
    report = cpr_ext.load_into(model, stores)
    assert (report.step, report.differences, report.rows_missing) == (1, [], 0)
    assert torch.equal(model.t.weight, torch.cat([trained.t.weight for _, trained, *_ in jobs]))
    assert torch.equal(torch.get_rng_state(), state)
    if kind in KINDS:
        assert torch.equal(model.linear.weight, jobs[0][1].linear.weight)
        again = Model(seed=6)
        cpr_ext.load_into(again, stores[0], mode="full")
        assert torch.equal(again.t.weight, model.t.weight)


def test_another_model_is_refused_and_unchanged(tmp_path):
    save(*cut_job(tmp_path, "sgd", [(0, ROWS)]))
    model = Model(seed=5)
    model.head = torch.nn.Linear(2, 2)
    before = model.t.weight.detach().clone()
    with pytest.raises(StoreError, match=r"'head\.weight' is not in the store"):
        cpr_ext.load_into(model, [tmp_path / "0"])
    assert torch.equal(model.t.weight, before)
    report = cpr_ext.load_into(model, [tmp_path / "0"], strict=False)
    assert len(report.differences) == 2
    assert not torch.equal(model.t.weight, before)
