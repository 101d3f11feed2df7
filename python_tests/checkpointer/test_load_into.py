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


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_loaded_without_optimizers(tmp_path, kind):
    ((_, trained, _, _),) = job = cut_job(tmp_path, kind, [(0, ROWS)])
    save(*job)
    model, state = Model(seed=5), torch.get_rng_state()
    report = cpr_ext.load_into(model, [tmp_path / "0"])
    assert (report.step, report.differences, report.rows_missing) == (1, [], 0)
    assert report.rows_restored == ROWS
    for value, expected in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_store_by_its_path_and_a_job_of_several_are_loaded(tmp_path):
    trained = Model(seed=1)
    optimizer = torch.optim.Adagrad(trained.parameters(), lr=0.1)
    with cpr_ext.Checkpointer(trained, optimizer, tmp_path / "one") as ckpt:
        trained.linear(trained.t.weight).sum().backward()
        optimizer.step()
        ckpt.step()
    model = Model(seed=5)
    cpr_ext.load_into(model, tmp_path / "one", mode="full")
    assert torch.equal(model.t.weight, trained.t.weight)

    jobs = cut_job(tmp_path / "parts", "adam", CUTS)
    save(*jobs)
    model = Model(seed=5)
    cpr_ext.load_into(model, [tmp_path / "parts" / "0", tmp_path / "parts" / "1"])
    assert torch.equal(model.t.weight, torch.cat([m.t.weight for _, m, *_ in jobs]))


def test_a_table_that_the_job_replicates_is_loaded(tmp_path):
    _, trained, _ = job = whole_job(tmp_path, "adam", one_optimizer=True)
    save(job)
    model = Model(seed=5)
    cpr_ext.load_into(model, [tmp_path])
    assert torch.equal(model.t.weight, trained.t.weight)


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
