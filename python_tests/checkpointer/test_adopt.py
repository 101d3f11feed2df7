"""A job that comes from a checkpoint of another kind begins at its position."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.wings.tools.maintenance import verify
from python_tests.helpers import SmallModel, Trained

OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


def test_only_a_job_that_begins_can_adopt_and_none_counts_beyond_what_verifies(tmp_path):
    run = Trained(tmp_path, save_at_close=True, **OPTIONS)
    with run.checkpointer as ckpt:
        for place in ({"step": MAX_SOUND + 1}, {"step": 1, "num_samples": MAX_SOUND + 1}):
            with pytest.raises(UsageError, match=f"is {MAX_SOUND + 1}; a store counts to"):
                ckpt.adopt(**place)
        ckpt.adopt(step=MAX_SOUND - 1, num_samples=MAX_SOUND - 8)
        run.train(1, num_samples=8)
        with pytest.raises(UsageError, match="is for a job that begins"):
            ckpt.adopt(step=5)
        with pytest.raises(UsageError, match=f"step is {MAX_SOUND + 1}"):
            run.train(1, num_samples=8)
    assert verify(tmp_path).damaged == []
    with Trained(tmp_path, **OPTIONS).checkpointer as ckpt:
        for step, told in ((5, "holds snapshots"), (-1, "step")):
            with pytest.raises(UsageError, match=told):
                ckpt.adopt(step=step)


UNREADABLE = [
    ({"x" * 5000: torch.ones(1)}, "letters"),
    (10**5000, "16610 bits"),
    ([1, -(10**5000)], "16610 bits"),
    (torch.ones((1,) * 40), "40 dimensions"),
]


@pytest.mark.parametrize("number", range(len(UNREADABLE)))
def test_a_value_that_no_reader_would_take_is_refused_at_once(tmp_path, number):
    value, told = UNREADABLE[number]
    with Trained(tmp_path, state={"mine": lambda: value}, **OPTIONS).checkpointer as ckpt:
        with pytest.raises(UsageError, match=told):
            ckpt.adopt(step=1)
        ckpt.save("base")
        with pytest.raises(cpr_ext.SnapshotError) as failed:
            ckpt.wait()
        assert told in str(failed.value.__cause__)


class Unnamed(SmallModel):
    """Gives its parameters numbers."""

    def state_dict(self, *args, **options):
        return dict(enumerate(super().state_dict(*args, **options).values()))


def test_a_model_that_no_reader_would_take_is_refused_at_once(tmp_path):
    model = Unnamed({"t": (20, 4)})
    with cpr_ext.Checkpointer(model, [], tmp_path, **OPTIONS) as ckpt:
        with pytest.raises(UsageError, match=r"not recovered: .*its parameters have no names"):
            ckpt.adopt(step=1)
