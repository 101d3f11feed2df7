"""Recovery after the death of the process."""

import pytest
import torch

from cpr_ext.errors import UsageError
from python_tests.helpers import Trained
from python_tests.recovery.losses import OPTIONS


def test_lookups_of_a_step_that_training_goes_back_behind_make_no_row_dirty(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.record_lookups("tables.big", torch.tensor([7, 8]))
    run.checkpointer.recover()
    run.checkpointer._recorder.flush()
    assert run.checkpointer._trackers["tables.big"].num_dirty(0, 200) == 0
    run.checkpointer.close()


def test_step_refuses_to_train_over_snapshots_that_were_not_recovered(tmp_path):
    run = Trained(tmp_path, **OPTIONS)
    run.train(1)
    run.checkpointer.close()
    fresh = Trained(tmp_path, **OPTIONS)
    files = sorted(tmp_path.rglob("*.safetensors"))
    for call in (fresh.checkpointer.step, fresh.checkpointer.save):
        with pytest.raises(UsageError, match=r"snapshot of step 1; call recover\(\)"):
            call()
    assert sorted(tmp_path.rglob("*.safetensors")) == files
    fresh.checkpointer.recover()
    fresh.train(1)
    fresh.checkpointer.close()
