"""Rows on a GPU, which parity protects by a copy: the GPU is memory of the host's beside it."""

import pytest
import torch

from cpr_ext.distributed.parity import own_rows
from python_tests.distributed.parity.members import Trainer


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(own_rows, "device_of", lambda tensor: 0)
    made = Trainer(tmp_path / "store")
    made.own.begin(0)
    return made


def rows(trainer):
    """All of the tables and their state, where training reads them."""
    arrays = [array for table in trainer.own.tables for array in table.arrays().values()]
    return torch.cat([array.detach().flatten() for array in arrays])


def test_parity_gets_the_deltas_that_it_gets_of_rows_on_the_cpu(tmp_path, trainer, monkeypatch):
    monkeypatch.undo()
    other = Trainer(tmp_path / "other")
    other.own.begin(0)
    for step in range(1, 5):
        torch.manual_seed(step)
        trainer.train(step)
        torch.manual_seed(step)
        other.train(step)
        for part in (0, 1):
            messages = [each.own.message(step, part).sort().values for each in (trainer, other)]
            assert torch.equal(*messages)
        assert torch.equal(trainer.words(), other.words())


@pytest.mark.filterwarnings("error::cpr_ext.UntrackedChangeWarning")
@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("steps_back", [0, 1, 2])
def test_rows_return_to_each_of_the_three_newest_states(trainer, steps_back, is_abandoned):
    known = {}
    for step in range(1, 6):
        trainer.train(step)
        known[step] = rows(trainer)
    trainer.forward(6).backward()
    trainer.optimizers[0].step()
    assert not torch.equal(rows(trainer), known[5])
    if is_abandoned:
        trainer.own.abandon_step()
        assert torch.equal(rows(trainer), known[5])
    state = 5 - steps_back
    trainer.own.go_back(state)
    assert torch.equal(rows(trainer), known[state])
    for step in range(state + 1, 7):
        trainer.train(step)
        assert torch.equal(rows(trainer), known.get(step, rows(trainer)))


def test_rows_count_as_they_are_where_parity_begins(trainer):
    with torch.no_grad():
        trainer.own.tables[0].weight.fill_(7.0)
    trainer.own.begin(0)
    known = rows(trainer)
    trainer.train(1)
    trainer.own.go_back(0)
    assert torch.equal(rows(trainer), known)


@pytest.mark.parametrize("way", ["go back", "visit"])
def test_a_row_that_something_changed_unseen_is_found(trainer, way):
    for step in (1, 2):
        trainer.train(step)
    trainer.own.tables[0].weight.data[49] += 1.0
    trainer.own.abandon_step()
    if way == "go back":
        trainer.own.go_back(1)
        trainer.own.find_wrong_rows()
    else:
        with trainer.own.visiting(1):
            trainer.own.find_wrong_rows()
    assert "rows changed outside their optimizer unseen: table 'large'" in trainer.own.obstacle


def test_a_row_that_is_written_by_hand_is_accepted(trainer):
    trainer.train(1)
    with torch.no_grad():
        trainer.own.tables[0].weight[49] += 1.0
    with pytest.warns(match="changed outside"):
        trainer.train(2)
    assert trainer.own.accept_changes(2).startswith("table 'large', among rows ")
    known = rows(trainer)
    trainer.train(3)
    trainer.own.go_back(2)
    assert torch.equal(rows(trainer), known)


def test_a_visit_to_an_earlier_state_leaves_rows_of_the_gpu(trainer):
    words = {}
    for step in (1, 2, 3):
        trainer.train(step)
        words[step] = trainer.words()
    known = rows(trainer)
    with trainer.own.visiting(2):
        assert torch.equal(trainer.words(), words[2])
    assert torch.equal(trainer.words(), words[3])
    assert torch.equal(rows(trainer), known)


def test_rebuilt_rows_reach_the_gpu(tmp_path, trainer):
    trainer.train(1)
    other = Trainer(tmp_path / "other", seed=1)
    other.own.begin(0)
    for part in (0, 1):
        words = torch.empty(trainer.own.part_words[part], dtype=torch.int64)
        trainer.own.read(1, part, 0, words)
        other.own.write(part, 0, words)
    whole = trainer.own.whole_copy(1)
    other.own.restore(1, whole, trainer.own.to_keep(1), [(0, trainer.own.layout.num_words)])
    assert other.own.obstacle == ""
    assert torch.equal(rows(other), rows(trainer))
