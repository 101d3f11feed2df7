"""Checkpoints of torch.save and torch.distributed.checkpoint become stores that jobs begin with."""

import errno
import json

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import cpr_ext
from cpr_ext.errors import CprError, StoreError, UsageError
from cpr_ext.wings.cli.app import app
from cpr_ext.wings.tools.maintenance import import_checkpoint, importing, verify
from python_tests.helpers import flip
from python_tests.recovery.test_replicated_tables import Model, train, whole_job

OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


def trained():
    """A model under an optimizer for its table, and Adam; and their state by name."""
    torch.manual_seed(3)
    model = Model(seed=3)
    of_table = torch.optim.Adagrad([model.t.weight], lr=0.1)
    dense = torch.optim.Adam(model.linear.parameters(), lr=0.01)
    train(model, [of_table, dense], 3)
    names = {id(p): name for name, p in model.named_parameters()}
    states = {names[id(p)]: dict(state) for o in (of_table, dense) for p, state in o.state.items()}
    return model, states


def resume(tmp_path, store, *, strict=True):
    model = Model(seed=9)
    of_table = torch.optim.Adagrad([model.t.weight], lr=0.1)
    dense = torch.optim.Adam(model.linear.parameters(), lr=0.01)
    ckpt = cpr_ext.Checkpointer(model, [of_table, dense], tmp_path / "job", **OPTIONS)
    before = torch.get_rng_state()
    report = ckpt.recover(from_store=[store], strict=strict)
    assert torch.equal(torch.get_rng_state(), before)
    return ckpt, report, model, (of_table, dense)


@pytest.mark.parametrize("form", ["torch.save", "dcp"])
def test_a_checkpoint_with_named_state_is_taken_in_every_bit(tmp_path, form):
    old, states = trained()
    tree = {"model": old.state_dict(), "optimizer": {"state": states}, "epoch": 3}
    if form == "dcp":
        save_dcp(tree, checkpoint_id=tmp_path / "other", no_dist=True)
    else:
        torch.save(tree, tmp_path / "other")
    report = import_checkpoint(tmp_path / "other", tmp_path / "store", step=700, num_samples=90)
    assert (report.tensors, report.parameters_with_state, report.notes) == (3, 3, ())
    assert verify(tmp_path / "store").damaged == []
    ckpt, found, model, optimizers = resume(tmp_path, tmp_path / "store")
    assert (found.step, found.num_samples, found.differences) == (700, 90, [])
    assert str(model.state_dict()) == str(old.state_dict())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                (name,) = (n for n, p in model.named_parameters() if p is parameter)
                assert str(optimizer.state[parameter]) == str(states[name])
    train(model, optimizers, 1)
    ckpt.step()
    ckpt.close()
    assert ckpt.step_count == 701


def test_state_that_has_no_names_is_named_and_left_out(tmp_path):
    old, _ = trained()
    optimizer = torch.optim.Adam(old.parameters(), lr=0.01)
    train(old, [optimizer], 1)
    tree = {"model_state_dict": old.state_dict(), "optim": optimizer.state_dict()}
    torch.save(tree, tmp_path / "other")
    report = import_checkpoint(tmp_path / "other", tmp_path / "store", step=5)
    assert report.parameters_with_state == 0
    assert ["numbers its parameters" in note for note in report.notes] == [True]
    with pytest.raises(StoreError, match=r"state of 'linear\.weight' is not in the checkpoint"):
        resume(tmp_path, tmp_path / "store")
    ckpt, found, model, _ = resume(tmp_path, tmp_path / "store", strict=False)
    assert found.step == 5
    assert torch.equal(model.t.weight, old.t.weight)
    ckpt.close()


def test_what_is_no_checkpoint_of_a_model_is_refused(tmp_path):
    torch.save({"weights": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "other")
    with pytest.raises(UsageError, match="holds: 'weights', 'epoch'"):
        import_checkpoint(tmp_path / "other", tmp_path / "store", step=1)
    report = import_checkpoint(tmp_path / "other", tmp_path / "store", step=1, model_key="weights")
    assert report.tensors == 1
    with pytest.raises(UsageError, match="is not empty"):
        import_checkpoint(tmp_path / "other", tmp_path / "store", step=1, model_key="weights")
    (tmp_path / "text").write_text(json.dumps({}))
    with pytest.raises(UsageError, match=r"torch\.load"):
        import_checkpoint(tmp_path / "text", tmp_path / "new", step=1)
    assert not (tmp_path / "new").exists()


W = {"e.weight": torch.ones(3, 2)}
REFUSED = {
    "a name that is a number": ({**W, 7: torch.ones(2)}, {}, r"a tensor under 7, .*state_dict\(\)"),
    "a step beyond what verifies": (W, {"step": 2**60 + 1}, "step is 1152921504606846977; "),
    "a step beyond all": (W, {"step": 2**63}, "step is 9223372036854775808; "),
    "samples beyond it": (W, {"num_samples": 2**60 + 1}, "num_samples is 1152921504606846977; "),
    "a negative step": (W, {"step": -1}, "step is -1; it must not be negative"),
    "no tensor": ({"x": W}, {}, "no tensor .*: 'x' is not a tensor, and left out"),
    "too long a name": ({"x" * 5000: torch.ones(2)}, {}, "a name of 50.. letters"),
    "too many dimensions": ({"x": torch.ones((1,) * 40)}, {}, "40 dimensions"),
    "a file in the way": (W, {"store": "other"}, "other' is a file, or in one; choose a new"),
    "below a file": (W, {"store": "other/deep"}, "deep' is a file, or in one; choose a new"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_reader_would_take_is_refused_and_leaves_nothing(tmp_path, what):
    model, options, told = REFUSED[what]
    torch.save({"model": model}, tmp_path / "other")
    store = tmp_path / options.pop("store", "new/store")
    with pytest.raises(UsageError, match=told):
        import_checkpoint(tmp_path / "other", store, **{"step": 1, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("wrong", [OSError(errno.EIO, "planted"), None])
def test_an_import_appears_at_once_or_not_at_all(tmp_path, monkeypatch, wrong):
    """What fails, or does not verify, after it was written: it is nowhere."""
    torch.save({"model": W}, tmp_path / "other")

    def look(store):
        assert not (tmp_path / "new").exists()
        if wrong is not None:
            raise wrong
        flip(next(store.rglob("*-dense.safetensors")), 300)
        return verify(store)

    monkeypatch.setattr(importing, "verify", look)
    with pytest.raises(CprError, match=r"cannot be kept in a store|cannot write .*: planted"):
        import_checkpoint(tmp_path / "other", tmp_path / "new/store", step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    monkeypatch.undo()
    (tmp_path / "new/store").mkdir(parents=True)
    (tmp_path / "new/.cpr-import-x").mkdir()  # of one that was killed
    report = import_checkpoint(tmp_path / "other", tmp_path / "new/store", step=1)
    assert ["new/.cpr-import-x' is of an import that was" in note for note in report.notes] == [
        True
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other"]
    assert verify(tmp_path / "new/store").is_sound


def test_a_job_that_replicates_all_and_a_bare_model_begin_with_it(tmp_path, capsys):
    old, states = trained()
    torch.save({"model": old.state_dict(), "optimizer": {"state": states}}, tmp_path / "other")
    arguments = ["import", str(tmp_path / "other"), str(tmp_path / "store"), "--step", "4"]
    app(arguments, standalone_mode=False)
    said = capsys.readouterr().out
    assert "step 4: 3 tensors" in said
    assert "optimizer state of 3 parameters" in said
    ckpt, model, _ = whole_job(tmp_path / "job", "adagrad", steps=0, seed=6)
    assert ckpt.recover(from_store=[tmp_path / "store"]).step == 4
    assert torch.equal(model.t.weight, old.t.weight)
    ckpt.close()
    torch.save(old.state_dict(), tmp_path / "bare")
    assert import_checkpoint(tmp_path / "bare", tmp_path / "model", step=0).tensors == 3
    model = Model(seed=8)
    cpr_ext.load_into(model, [tmp_path / "model"])
    assert torch.equal(model.t.weight, old.t.weight)
