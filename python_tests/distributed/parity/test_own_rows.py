"""What a worker records of its own rows, and its way back; what it holds of another's."""

import random

import numpy as np
import pytest
import torch

import cpr_ext
from cpr_ext.distributed.parity.protocol import Log, ProtocolError
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.distributed.parity.members import ROWS, Trainer, holding

OPTIMIZERS = {
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.1),
    "rowwise": lambda rows: RowWiseAdagrad(rows, lr=0.1),
    "sparse adam": lambda rows: torch.optim.SparseAdam(rows, lr=0.1),
    "sgd": lambda rows: torch.optim.SGD(rows, lr=0.1),
    "decaying": lambda rows: torch.optim.Adagrad(rows, lr=0.1, lr_decay=0.5),
}


@pytest.fixture
def trainer(tmp_path):
    made = Trainer(tmp_path / "store")
    made.own.begin(0)
    return made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_back", [0, 1, 2])
def test_a_worker_returns_to_each_of_its_three_newest_states_in_every_bit(
    tmp_path, optimizer, steps_back
):
    trainer = Trainer(tmp_path, make=OPTIMIZERS[optimizer])
    trainer.own.begin(0)
    known = {}
    for step in range(1, 6):
        trainer.train(step)
        known[step] = trainer.words(), trainer.dense()
    trainer.forward(6).backward()
    trainer.optimizers[0].step()  # the step is torn: the dense part has not changed
    torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002
    state = 5 - steps_back
    trainer.own.go_back(state)
    assert torch.equal(trainer.words(), known[state][0])
    assert trainer.dense() == known[state][1]
    assert trainer.own.log == Log(state, 3)
    assert trainer.checkpointer.step_count == state
    for step in range(state + 1, 6):  # and the same way again
        trainer.train(step)
        assert torch.equal(trainer.words(), known[step][0])
        assert trainer.dense() == known[step][1]
    with pytest.raises((ProtocolError, KeyError)):
        trainer.own.go_back(2)


@pytest.mark.parametrize(
    ("saved", "kind"), [([1], "partial"), ([1, 3], "partial"), ([1, 4], "base")]
)
def test_snapshots_of_undone_steps_are_dropped_and_then_all_rows_are_saved(tmp_path, saved, kind):
    """Where none is dropped, the next snapshot needs the changed rows only."""
    trainer = Trainer(tmp_path / "store", priority=cpr_ext.AllRows())
    trainer.own.begin(0)
    for step in range(1, 5):
        trainer.train(step)
        if step in saved:
            trainer.checkpointer.save("partial").wait_until_done()
            trainer.checkpointer.wait()
    trainer.own.go_back(3)
    known = trainer.words()
    steps = [record.last_step for record in trainer.checkpointer.store.manifest.dense]
    assert steps == [step for step in saved[-1:] if step <= 3]  # the store keeps one
    snapshot = trainer.checkpointer.save("partial")
    assert snapshot.kind == kind
    trainer.checkpointer.wait()
    trainer.checkpointer.close()
    other = Trainer(tmp_path / "store", seed=1, priority=cpr_ext.AllRows())
    assert other.checkpointer.recover().step == 3
    other.own.begin(3)
    assert torch.equal(other.words(), known)


def torn_trainer(directory, stride):
    """In the middle of step 9, with its words and dense state after each step."""
    trainer = Trainer(directory, stride=stride)
    trainer.own.begin(0)
    known = {}
    for step in range(1, 9):
        assert trainer.train(step) == (step % stride == 0)
        known[step] = trainer.words(), trainer.dense()
    trainer.forward(9).backward()
    trainer.optimizers[0].step()
    return trainer, known


@pytest.mark.parametrize("state", [0, 3, 6])
def test_a_delta_of_several_steps_leads_back_to_the_one_before(tmp_path, state):
    trainer, known = torn_trainer(tmp_path, 3)
    trainer.own.go_back(state)
    assert trainer.own.log == Log(state, 0, 3)
    if state:
        assert torch.equal(trainer.words(), known[state][0])
        assert trainer.dense() == known[state][1]
    for step in range(state + 1, 9):
        assert trainer.train(step) == (step % 3 == 0)
        assert torch.equal(trainer.words(), known[step][0])
        assert trainer.dense() == known[step][1]


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_an_abandoned_step_leaves_all_completed_ones(tmp_path, stride):
    trainer, known = torn_trainer(tmp_path, stride)
    trainer.own.abandon_step()
    assert trainer.checkpointer.step_count == 8
    assert torch.equal(trainer.words(), known[8][0])
    assert trainer.dense() == known[8][1]


def test_one_delta_of_several_steps_has_each_row_once(tmp_path):
    trainer = Trainer(tmp_path, stride=3, parts=1)
    held = holding(trainer.own.layout.num_words, 0, stride=3)
    trainer.own.begin(0)
    begin = trainer.words()
    for step in range(1, 8):
        trainer.train(step)
        if step % 3 == 0:
            held.receive(0, step, trainer.own.message(step, 0))
            assert torch.equal(held.words, begin ^ trainer.words())
    held.go_back(3)
    trainer.own.go_back(3)
    assert torch.equal(held.words, begin ^ trainer.words())


@pytest.mark.parametrize(("stride", "state"), [(1, 7), (1, 6), (3, 6), (3, 3)])
def test_a_visit_to_an_earlier_state_changes_rows_and_nothing_else(tmp_path, stride, state):
    trainer, known = torn_trainer(tmp_path, stride)
    trainer.own.abandon_step()
    for _ in range(2):  # a loss may interrupt the first
        with trainer.own.visiting(state):
            assert torch.equal(trainer.words(), known[state][0])
            assert trainer.dense() == known[8][1]
            trainer.own.find_wrong_rows()
        assert torch.equal(trainer.words(), known[8][0])
    assert trainer.own.obstacle == ""
    trainer.own.begin(8)
    for step in (9, 10, 11):
        trainer.train(step)
    trainer.own.find_wrong_rows()
    assert (trainer.own.obstacle, trainer.own.log.newest) == ("", 11)


def test_messages_keep_parity_up_to_date_and_lead_it_back(trainer):
    held = [holding(words, 0) for words in trainer.own.part_words]
    begin = trainer.words()
    states = {}
    for step in range(1, 5):
        trainer.train(step)
        for part, parity in enumerate(held):
            parity.receive(0, step, trainer.own.message(step, part))
        states[step] = torch.cat([parity.words for parity in held])
        assert torch.equal(states[step], begin ^ trainer.words())
    for parity in held:
        parity.go_back(2)
        assert parity.logs == {0: Log(2, 2)}
    assert torch.equal(torch.cat([parity.words for parity in held]), states[2])


def test_a_delta_that_comes_twice_or_too_early_is_not_applied(trainer):
    held = holding(trainer.own.part_words[0], 0)
    for step in (1, 2):
        trainer.train(step)
    message = trainer.own.message(1, 0)
    held.receive(0, 1, message)
    once = held.words.clone()
    for step in (1, 3):
        with pytest.raises(ProtocolError):
            held.receive(0, step, message)
    assert torch.equal(held.words, once)
    assert held.logs == {0: Log(1, 0)}


def test_rows_are_read_and_written_by_part(tmp_path, trainer):
    other = Trainer(tmp_path / "other", seed=1)
    for part, words in enumerate(trainer.own.part_words):
        for begin in range(0, words, 16):
            piece = torch.zeros(min(16, words - begin), dtype=torch.int64)
            trainer.own.read(0, part, begin, piece)
            other.own.write(part, begin, piece)
    assert torch.equal(other.words(), trainer.words())
    beyond = torch.full((4,), 7)
    trainer.own.read(0, 0, trainer.own.part_words[0] - 1, beyond)
    assert beyond[1:].tolist() == [7, 7, 7]  # nothing of the next part


def test_rows_are_read_as_of_the_state_before_while_and_after_a_step_changes_them(trainer):
    """A lost worker's rows are decoded from them while this worker trains."""
    trainer.train(1)
    own, known = trainer.own, trainer.words()

    def require_known():
        for part, words in enumerate(own.part_words):
            found, first = torch.zeros(words, dtype=torch.int64), own.bounds[part]
            expected = known[first : first + words]
            for begin in range(0, words, 7):
                own.read(1, part, begin, found[begin : begin + 7])
            assert torch.equal(found, expected)
            places = torch.arange(0, words + 20, 5)
            beyond = torch.cat((expected, torch.zeros(25, dtype=torch.int64)))
            rows = torch.stack([beyond[place : place + 4] for place in places.tolist()])
            assert torch.equal(own.gather(1, part, places, 4), rows.view(-1))

    require_known()
    own.before_change(trainer.checkpointer.tables[0], torch.tensor([3, 9, 40]))
    with torch.no_grad():
        trainer.model["large"].weight[3] += 1.0  # an optimizer in the middle of its step
    require_known()
    with torch.no_grad():
        trainer.model["large"].weight[3] -= 1.0
    own.abandon_step()
    trainer.train(2)
    assert not torch.equal(trainer.words(), known)
    require_known()
    trainer.train(3)
    with pytest.raises(ProtocolError, match="rows changed twice after state 1"):
        require_known()


def test_a_replacement_takes_what_is_shared_and_what_was_its_predecessors(tmp_path):
    """Generators, buffers and state of the tables' optimizer are its own; the rest is shared."""
    trainers = [
        Trainer(tmp_path / str(n), seed=n, make=OPTIMIZERS["sparse adam"]) for n in (1, 2, 3)
    ]
    lost, source, replacement = trainers
    for trainer in (lost, source):
        trainer.own.begin(0)
        for step in range(1, 3 if trainer is lost else 2):
            trainer.train(step)
    source.train(2)
    torch.rand(3)
    for part, words in enumerate(lost.own.part_words):
        rows = torch.zeros(words, dtype=torch.int64)
        lost.own.read(2, part, 0, rows)
        replacement.own.write(part, 0, rows)
    everything = [(0, lost.own.layout.num_words)]
    replacement.own.restore(2, source.own.whole_copy(2), lost.own.to_keep(2), everything)
    assert replacement.checkpointer.step_count == 2
    [shared, own, got] = [
        trainer.own.whole_copy(2).tree() for trainer in (source, lost, replacement)
    ]
    for name in ("dense.weight", "dense.bias"):
        assert torch.equal(got["model"][name], shared["model"][name])
    assert torch.equal(got["rng"]["torch"], own["rng"]["torch"])
    assert got["optimizers"][0]["states"] == own["optimizers"][0]["states"]


@pytest.mark.parametrize("says_so", [False, True])
def test_rows_changed_outside_the_optimizer_are_an_obstacle(trainer, says_so):
    for step in range(1, 8):  # PyTorch's counters are known then
        trainer.train(step)
    assert trainer.own.obstacle == ""
    with torch.no_grad():
        trainer.model["large"].weight[3] += 1.0
    if says_so:
        trainer.checkpointer.record_changes()
        trainer.train(8)
    else:
        with pytest.warns(UntrackedChangeWarning):
            trainer.train(8)
    assert trainer.own.obstacle == "table 'large' was changed outside its optimizer"
    trainer.own.begin(8)
    assert trainer.own.obstacle == ""


@pytest.mark.parametrize("steps_back", [0, 1, 2])
def test_rows_written_as_is_said_first_are_in_the_deltas(trainer, steps_back):
    known, weight = {}, trainer.model["large"].weight
    for step in range(1, 6):
        with trainer.checkpointer.writing_rows("large", torch.tensor([3, step, 3])):
            weight.data[[3, step]] = float(step)
        trainer.train(step)
        known[step] = trainer.words()
    with trainer.checkpointer.writing_rows("large", torch.tensor([7])):
        weight.data[7] = -1.0  # of a step that is torn
    trainer.own.go_back(5 - steps_back)
    assert trainer.own.obstacle == ""
    assert torch.equal(trainer.words(), known[5 - steps_back])


def test_changed_rows_are_accepted_once_and_named(trainer, monkeypatch):
    own = trainer.own
    for step in range(1, 8):
        trainer.train(step)
    with torch.no_grad():
        trainer.model["large"].weight[3] += 1.0
    with pytest.warns(UntrackedChangeWarning):
        trainer.train(8)
    own.rest_seconds = 60.0
    said = "table 'large', among rows 3 to 3, were changed outside their optimizer"
    assert own.accept_changes(8) == said
    assert (own.obstacle, own.wants_encoding, own.log) == ("", True, Log(8, 8))
    own.find_wrong_rows()
    assert own.obstacle == ""
    own.changed_outside(own.tables[0])  # too soon: it reads all rows
    trainer.train(9)
    assert (own.accept_changes(9), bool(own.obstacle)) == ("", True)
    monkeypatch.setattr(own, "_accepts_from", 0.0)
    own.wants_encoding = False
    assert own.accept_changes(9) == ""  # nothing differs, but peers were told that it does
    assert (own.obstacle, own.wants_encoding, own.log) == ("", True, Log(9, 8))


def test_a_state_tensor_that_is_replaced_is_an_obstacle(trainer):
    trainer.train(1)
    state = trainer.optimizers[0].state[trainer.model["large"].weight]
    state["sum"] = state["sum"].clone()
    trainer.train(2)
    assert "table 'large': sum was replaced" in trainer.own.obstacle or trainer.own.obstacle


class MakesStateLate(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("age", torch.zeros(len(parameter)))


def test_per_row_state_made_in_a_step_is_refused_by_name(tmp_path):
    trainer = Trainer(tmp_path, make=lambda rows: MakesStateLate(rows, lr=0.1))
    trainer.own.begin(0)
    with pytest.raises(UsageError, match=r"table 'large'.*per-row state \['age'\].*Create it bef"):
        trainer.train(1)


def test_a_small_table_that_changes_as_a_whole_is_recorded_as_a_whole(tmp_path):
    trainer = Trainer(tmp_path, make=lambda rows: torch.optim.Adagrad(rows, lr=0.1))
    trainer.own.begin(0)
    for group in trainer.optimizers[0].param_groups:
        group["weight_decay"] = 0.1  # it looks so, but refuses sparse gradients
    trainer.own.before_change(trainer.checkpointer.tables[0], torch.tensor([1]))
    assert trainer.own._changing.num_rows == ROWS
