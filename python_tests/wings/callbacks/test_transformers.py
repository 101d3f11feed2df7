"""The callback under the real Trainer: killed, resumed in mid-epoch, equal bit for bit."""

import signal
from types import SimpleNamespace

import pytest
import torch

import cpr_ext
from cpr_ext.errors import UsageError
from python_tests.helpers import run_python

pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'cpr_ext[transformers]'")
pytest.importorskip("transformers", reason="needs it: pip install 'cpr_ext[transformers]'")

from cpr_ext.wings.callbacks.transformers import CprTrainerCallback
from python_tests.wings.callbacks.transformers_job import NUM_EPOCHS, Model, fit, make_trainer

CODE = """
import sys
from python_tests.wings.callbacks.transformers_job import fit
fit(sys.argv[1], die_after=int(sys.argv[2]), accumulate=int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("die_after", "accumulate", "saved_at"),
    [
        (19, 1, 16),  # 12 steps an epoch: in the middle of the second
        (14, 1, 11),
        (8, 2, 6),  # 6 steps an epoch: at the end of the first
    ],
)
def test_a_killed_training_ends_bit_for_bit_as_one_that_was_not(
    tmp_path, die_after, accumulate, saved_at
):
    run_python(CODE, tmp_path / "killed", die_after, accumulate, returncode=-signal.SIGKILL)
    model, callback, trainer = fit(tmp_path / "killed", accumulate=accumulate)
    assert callback.report.step == saved_at
    whole, _, whole_trainer = fit(tmp_path / "whole", accumulate=accumulate)
    assert len(whole.seen) == 12 * NUM_EPOCHS
    assert model.seen == whole.seen[saved_at * accumulate :]
    assert trainer.state.global_step == whole_trainer.state.global_step
    assert trainer.lr_scheduler.state_dict() == whole_trainer.lr_scheduler.state_dict()
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    again, callback, _ = fit(tmp_path / "whole", accumulate=accumulate)  # nothing is left to train
    assert again.seen == []
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_exception_releases_the_store_and_saves_nothing_more(tmp_path, monkeypatch):
    original = Model.forward

    def failing(self, rows, number):
        if len(self.seen) == 8:
            raise KeyError("no more data")
        return original(self, rows, number)

    monkeypatch.setattr(Model, "forward", failing)
    with pytest.raises(KeyError):
        fit(tmp_path / "store")
    monkeypatch.undo()
    _, callback, _ = fit(tmp_path / "store")
    assert callback.report.step == 6


def trainer_like(**changes):
    args = {"world_size": 1, "n_gpu": 0, "auto_find_batch_size": False}
    args |= {"load_best_model_at_end": False}
    return SimpleNamespace(args=SimpleNamespace(**(args | changes)), model_init=None)


REFUSED = {
    "the Trainer has 4 processes and 0 GPUs": (trainer_like(world_size=4), {}),
    "1 processes and 2 GPUs": (trainer_like(n_gpu=2), {}),
    "both restore the model": (trainer_like(), {"resume_from_checkpoint": True}),
    "cannot be used with auto_find_batch_size": (trainer_like(auto_find_batch_size=True), {}),
    "with load_best_model_at_end": (trainer_like(load_best_model_at_end=True), {}),
}


def test_what_would_save_another_state_is_refused(tmp_path):
    for words, (trainer, arguments) in REFUSED.items():
        with pytest.raises(UsageError, match=words):
            CprTrainerCallback("x").train(trainer, **arguments)
    trainer = make_trainer(Model(), tmp_path)
    trainer.add_callback(CprTrainerCallback(tmp_path / "store"))
    with pytest.raises(UsageError, match=r"call callback.train\(trainer\)"):
        trainer.train()
    assert not (tmp_path / "store").exists()
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    with cpr_ext.Checkpointer(model, optimizer, tmp_path / "store") as ckpt:
        ckpt.step()
    with pytest.raises(UsageError, match="of a loop without CprTrainerCallback"):
        fit(tmp_path / "store")
