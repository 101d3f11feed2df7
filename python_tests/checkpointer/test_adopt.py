"""A job that comes from a checkpoint of another kind begins at its position."""

import pytest
import torch

import cpr_ext
from cpr_ext.errors import UsageError
from cpr_ext.state.position import MAX_SOUND
from cpr_ext.wings.tools.maintenance import verify

OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.nn.EmbeddingBag(20, 4, sparse=True)
        self.linear = torch.nn.Linear(4, 1)


def make(seed):
    torch.manual_seed(seed)
    model = Model()
    return model, [
        torch.optim.Adagrad(model.t.parameters(), lr=0.1),
        torch.optim.Adam(model.linear.parameters(), lr=0.01),
    ]


def train(model, optimizers, ckpt, steps):
    for _ in range(steps):
        ids = (torch.arange(6) * (1 + ckpt.step_count)) % 20
        model.linear(model.t(ids[None])).sin().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ckpt.step(8)


def state(model, optimizers):
    return model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


@pytest.mark.parametrize("loaded_first", [True, False])
def test_a_job_adopts_a_loaded_state_and_recovers_at_its_position(tmp_path, loaded_first):
    model, optimizers = make(0)
    with cpr_ext.Checkpointer(model, optimizers, tmp_path / "a", **OPTIONS) as ckpt:
        train(model, optimizers, ckpt, 5)
        torch.save(state(model, optimizers), tmp_path / "other.pt")
        train(model, optimizers, ckpt, 4)
        expected = state(model, optimizers)

    def load(model, optimizers):
        weights, states = torch.load(tmp_path / "other.pt", weights_only=True)
        model.load_state_dict(weights)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)

    model, optimizers = make(1)
    if loaded_first:
        load(model, optimizers)
    with cpr_ext.Checkpointer(model, optimizers, tmp_path / "b", **OPTIONS) as ckpt:
        assert ckpt.recover().step == 0
        if not loaded_first:
            load(model, optimizers)
        ckpt.adopt(step=5, num_samples=40)
        assert (ckpt.step_count, ckpt.num_samples) == (5, 40)
        train(model, optimizers, ckpt, 2)

    model, optimizers = make(2)
    with cpr_ext.Checkpointer(model, optimizers, tmp_path / "b", **OPTIONS) as ckpt:
        report = ckpt.recover()
        assert (report.step, report.num_samples, report.rows_missing) == (7, 56, 0)
        train(model, optimizers, ckpt, 2)
    assert str(state(model, optimizers)) == str(expected)


def test_only_a_job_that_begins_can_adopt_and_none_counts_beyond_what_verifies(tmp_path):
    model, optimizers = make(0)
    with cpr_ext.Checkpointer(model, optimizers, tmp_path, **OPTIONS) as ckpt:
        for place in ({"step": MAX_SOUND + 1}, {"step": 1, "num_samples": MAX_SOUND + 1}):
            with pytest.raises(UsageError, match=f"is {MAX_SOUND + 1}; a store counts to"):
                ckpt.adopt(**place)
        ckpt.adopt(step=MAX_SOUND - 1, num_samples=MAX_SOUND - 8)
        train(model, optimizers, ckpt, 1)
        with pytest.raises(UsageError, match="is for a job that begins"):
            ckpt.adopt(step=5)
        with pytest.raises(UsageError, match=f"step is {MAX_SOUND + 1}"):
            train(model, optimizers, ckpt, 1)
    assert verify(tmp_path).damaged == []
    with cpr_ext.Checkpointer(model, optimizers, tmp_path, **OPTIONS) as ckpt:
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
    model, optimizers = make(0)
    options = {**OPTIONS, "state": {"mine": lambda: value}}
    with cpr_ext.Checkpointer(model, optimizers, tmp_path, **options) as ckpt:
        with pytest.raises(UsageError, match=told):
            ckpt.adopt(step=1)
        ckpt.save("base")
        with pytest.raises(cpr_ext.SnapshotError) as failed:
            ckpt.wait()
        assert told in str(failed.value.__cause__)


class Unnamed(Model):
    """Gives its parameters numbers."""

    def state_dict(self, *args, **options):
        return dict(enumerate(super().state_dict(*args, **options).values()))


def test_a_model_that_no_reader_would_take_is_refused_at_once(tmp_path):
    model = Unnamed()
    with cpr_ext.Checkpointer(model, [], tmp_path, **OPTIONS) as ckpt:
        with pytest.raises(UsageError, match=r"not recovered: .*its parameters have no names"):
            ckpt.adopt(step=1)
