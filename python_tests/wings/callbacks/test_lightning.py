"""The callback under the real Trainer: killed, resumed in mid-epoch, equal bit for bit."""

import signal
from types import SimpleNamespace

import pytest
import torch

from cpr_ext.errors import UsageError
from python_tests.helpers import run_python

pytest.importorskip("lightning", reason="needs Lightning: pip install 'cpr_ext[lightning]'")

from cpr_ext.wings.callbacks.lightning import CprCallback
from cpr_ext.wings.callbacks.loops import first_dimension
from python_tests.wings.callbacks import lightning_job
from python_tests.wings.callbacks.lightning_job import NUM_BATCHES, NUM_EPOCHS, Batches, fit

CODE = """
import sys
from python_tests.wings.callbacks.lightning_job import fit
fit(sys.argv[1], die_after=int(sys.argv[2]), accumulate=int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("die_after", "accumulate", "resumed_at"),
    [
        (19, 1, (1, 4)),  # step 16 of 12 a epoch: the fifth batch of the second
        (14, 1, (0, 11)),  # saved at step 11
        (8, 2, (1, 0)),  # saved at step 6, the end of the first epoch
    ],
)
def test_a_killed_fit_ends_bit_for_bit_as_one_that_was_not(
    tmp_path, die_after, accumulate, resumed_at
):
    run_python(CODE, tmp_path / "killed", die_after, accumulate, returncode=-signal.SIGKILL)
    model, callback, trainer = fit(tmp_path / "killed", accumulate=accumulate)
    assert 0 < callback.report.step < die_after
    assert model.seen[0] == resumed_at
    whole, _, whole_trainer = fit(tmp_path / "whole", accumulate=accumulate)
    assert len(whole.seen) == NUM_BATCHES * NUM_EPOCHS
    assert model.seen == whole.seen[-len(model.seen) :]
    assert trainer.global_step == whole_trainer.global_step
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=0, atol=0)
    again, callback, _ = fit(tmp_path / "whole", accumulate=accumulate)  # nothing is left to train
    assert again.seen == []
    assert callback.checkpointer is None  # the store is released
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_exception_releases_the_store_and_saves_nothing(tmp_path, monkeypatch):
    class Failing(Batches):
        def __iter__(self):
            yield from list(super().__iter__())[:7]
            raise KeyError("no more data")

    monkeypatch.setattr(lightning_job, "Batches", Failing)
    with pytest.raises(KeyError):
        fit(tmp_path)
    monkeypatch.undo()
    _, callback, _ = fit(tmp_path)
    assert callback.report.step == 6


def test_other_processes_and_checkpoints_are_refused_and_samples_of_a_batch_counted():
    class FSDPStrategy:
        pass

    trainer = SimpleNamespace(world_size=4, strategy=FSDPStrategy(), ckpt_path=None)
    with pytest.raises(UsageError, match="one process; the Trainer has 4, under FSDPStrategy"):
        CprCallback("x").on_fit_start(trainer, None)
    trainer = SimpleNamespace(world_size=1, ckpt_path="last.ckpt")
    with pytest.raises(UsageError, match="both restore the model"):
        CprCallback("x").on_fit_start(trainer, None)
    rows = torch.zeros(5, 2)
    for batch in (rows, [rows, torch.zeros(9)], {"a": (rows,)}):
        assert first_dimension(batch) == 5
    for batch in (torch.tensor(1), "text", [], 3):
        assert first_dimension(batch) == 1
