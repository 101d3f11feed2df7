"""What a worker records of its own rows, and its way back; what it holds of another's.

Of rows on a GPU parity protects a copy; here the GPU is memory of the host's beside it.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch

import cpr_ext
from cpr_ext.distributed.parity import own_rows
from cpr_ext.distributed.parity.own_rows import RowChecksums
from cpr_ext.distributed.parity.protocol import Log, ProtocolError
from cpr_ext.errors import UntrackedChangeWarning, UsageError
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.distributed.parity.members import ROWS, Trainer, holding
from python_tests.helpers import assert_same

ADAGRAD = torch.optim.Adagrad
OPTIMIZERS = {
    "adagrad": partial(ADAGRAD, lr=0.1), "decaying": partial(ADAGRAD, lr=0.1, lr_decay=0.5),
    "rowwise": partial(RowWiseAdagrad, lr=0.1), "sgd": partial(torch.optim.SGD, lr=0.1),
    "sparse adam": partial(torch.optim.SparseAdam, lr=0.1),
}  # fmt: skip


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def begun(request, monkeypatch, tmp_path):
    """Makes trainers whose parity has begun."""
    if request.param:
        monkeypatch.setattr(own_rows, "device_of", lambda tensor: 0)

    def make(name="store", **options):
        trainer = Trainer(tmp_path / name, **options)
        trainer.own.begin(0)
        return trainer

    make.is_gpu = request.param
    return make


@pytest.fixture
def trainer(begun):
    return begun()


def rows(trainer):
    """All of the tables and their state, where training reads them."""
    arrays = [array for table in trainer.own.tables for array in table.arrays().values()]
    return torch.cat([array.detach().flatten() for array in arrays])


def all_of(trainer):
    return trainer.words(), rows(trainer), trainer.dense()


def tear(trainer, step):
    """A step of which the dense part has not changed."""
    trainer.forward(step).backward()
    trainer.optimizers[0].step()
    torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002


def torn(begun, stride=1, steps=8, **options):
    """In the middle of the next step, with its states after each before."""
    trainer = begun(stride=stride, **options)
    known = {0: all_of(trainer)}
    for step in range(1, steps + 1):
        assert trainer.train(step) == (step % stride == 0)
        known[step] = all_of(trainer)
    tear(trainer, steps + 1)
    return trainer, known


@pytest.mark.parametrize(
    ("optimizer", "stride", "states"),
    [*((name, 1, (5, 4, 3)) for name in OPTIMIZERS), ("adagrad", 3, (6, 3, 0))],
)
def test_a_worker_returns_to_each_of_its_newest_states_in_every_bit(
    begun, optimizer, stride, states
):
    last = states[0] + stride - 1
    trainer, known = torn(begun, stride, last, make=OPTIMIZERS[optimizer])
    for state in states:
        trainer.own.go_back(state)
        assert_same(all_of(trainer), known[state])
        assert trainer.own.log == Log(state, states[-1], stride)
        assert trainer.checkpointer.step_count == state
        for step in range(state + 1, last + 1):  # and the same way again
            assert trainer.train(step) == (step % stride == 0)
            assert_same(all_of(trainer), known[step])
        tear(trainer, last + 1)
    with pytest.raises((ProtocolError, KeyError)):
        trainer.own.go_back(2)


@pytest.mark.parametrize(("stride", "state"), [(1, 7), (1, 6), (3, 6), (3, 3), (4, 4)])
def test_an_abandoned_step_leaves_all_completed_ones_and_a_visit_changes_rows_alone(
    begun, stride, state
):
    trainer, known = torn(begun, stride)
    trainer.own.abandon_step()
    assert trainer.checkpointer.step_count == 8
    assert_same(all_of(trainer), known[8])
    for _ in range(2):  # a loss may interrupt the first
        with trainer.own.visiting(state):
            assert torch.equal(trainer.words(), known[state][0])
            assert trainer.dense() == known[8][2]
            trainer.own.find_wrong_rows()
        assert_same(all_of(trainer), known[8])
    assert trainer.own.obstacle == ""
    trainer.own.begin(8)
    last = 8 + max(stride, 3)
    for step in range(9, last + 1):
        trainer.train(step)
    trainer.own.find_wrong_rows()
    assert (trainer.own.obstacle, trainer.own.log.newest) == ("", last)


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
    assert trainer.checkpointer.save("partial").kind == kind
    trainer.checkpointer.wait()
    trainer.checkpointer.close()
    other = Trainer(tmp_path / "store", seed=1, priority=cpr_ext.AllRows())
    assert other.checkpointer.recover().step == 3
    other.own.begin(3)
    assert torch.equal(other.words(), known)


@pytest.mark.parametrize(("stride", "parts"), [(1, 2), (3, 1)])
def test_deltas_keep_parity_up_to_date_and_lead_it_back(begun, stride, parts):
    """Once, and in their order; one of several steps has each row once."""
    trainer = begun(stride=stride, parts=parts)
    held = [holding(words, 0, stride=stride) for words in trainer.own.part_words]
    begin, states = trainer.words(), {}
    for step in range(1, 8):
        if not trainer.train(step):
            continue
        for part, parity in enumerate(held):
            message = trainer.own.message(step, part)
            parity.receive(0, step, message)
            for other in (step, step + 2 * stride):
                with pytest.raises(ProtocolError):
                    parity.receive(0, other, message)
        states[step] = torch.cat([parity.words for parity in held])
        assert torch.equal(states[step], begin ^ trainer.words())
    state = max(states) - stride
    for parity in held:
        parity.go_back(state)
        assert parity.logs[0].newest == state
    assert torch.equal(torch.cat([parity.words for parity in held]), states[state])


def test_rows_are_read_as_of_the_state_before_while_and_after_a_step_changes_them(tmp_path):
    """A lost worker's rows are decoded from them while this worker trains."""
    trainer = Trainer(tmp_path)
    own = trainer.own
    own.begin(0)
    trainer.train(1)
    known = trainer.words()

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
    weight = trainer.model["large"].weight.data
    weight[3] += 1.0  # an optimizer in the middle of its step
    require_known()
    weight[3] -= 1.0
    own.abandon_step()
    trainer.train(2)
    assert not torch.equal(trainer.words(), known)
    require_known()
    trainer.train(3)
    with pytest.raises(ProtocolError, match="rows changed twice after state 1"):
        require_known()


def test_a_replacement_takes_what_is_shared_and_what_was_its_predecessors(begun):
    """Generators, buffers and state of the tables' optimizer are its own; the rest is shared.

    Rows that are not those of the state are refused, and nothing is taken.
    """
    make = OPTIMIZERS["sparse adam"]
    lost, source, replacement = (begun(str(n), seed=n, make=make) for n in (1, 2, 3))
    for trainer in (lost, source):
        trainer.train(1)
        trainer.train(2)
    torch.rand(3)
    kept, whole = lost.own.to_keep(2), source.own.shared_copy(2)
    everything, before = [(0, lost.own.layout.num_words)], replacement.dense()
    replacement.own.restore(2, whole, kept, everything)
    assert "rebuilt rows differ from their checksums: table 'large'" in replacement.own.obstacle
    assert replacement.dense() == before
    for part, words in enumerate(lost.own.part_words):
        copy = torch.zeros(words, dtype=torch.int64)
        lost.own.read(2, part, 0, copy)
        replacement.own.write(part, 0, copy)
    replacement.own.restore(2, whole, kept, everything)
    assert (replacement.own.obstacle, replacement.checkpointer.step_count) == ("", 2)
    assert torch.equal(rows(replacement), rows(lost))
    [shared, own, got] = [trainer.own._copies[2].tree() for trainer in (source, lost, replacement)]
    for name in ("dense.weight", "dense.bias"):
        assert torch.equal(got["model"][name], shared["model"][name])
    assert torch.equal(got["rng"]["torch"], own["rng"]["torch"])
    assert got["optimizers"][0]["states"] == own["optimizers"][0]["states"]
    replacement.train(3)
    replacement.own.find_wrong_rows()
    assert replacement.own.obstacle == ""


@pytest.mark.parametrize("stride", [1, 2])
def test_what_changed_unseen_before_any_of_the_newest_steps_is_found(begun, stride):
    trainer = begun(stride=stride)
    for step in range(1, 7):
        if step == 5:
            # PyTorch does not count it, and no step looks this row up.
            trainer.model["large"].weight.data[49] += 1.0
        trainer.train(step)
    trainer.own.find_wrong_rows()
    assert bool(trainer.own.obstacle) != begun.is_gpu  # a copy hides it until then
    trainer.own.abandon_step()
    trainer.own.go_back(6 - stride)
    trainer.own.find_wrong_rows()
    assert "table 'large', among rows 49 to 49" in trainer.own.obstacle
    trainer.own.begin(6)
    assert trainer.own.obstacle == ""
    trainer.model["small"].weight.data.zero_()
    trainer.own.abandon_step()
    with trainer.own.visiting(6):
        trainer.own.find_wrong_rows()
    assert "table 'small', among rows 0 to 0, and 6 more blocks" in trainer.own.obstacle


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
    known = rows(trainer)
    own.changed_outside(own.tables[0])  # too soon: it reads all rows
    trainer.train(9)
    assert (own.accept_changes(9), bool(own.obstacle)) == ("", True)
    monkeypatch.setattr(own, "_accepts_from", 0.0)
    own.wants_encoding = False
    assert own.accept_changes(9) == ""  # nothing differs, but peers were told that it does
    assert (own.obstacle, own.wants_encoding, own.log) == ("", True, Log(9, 8))
    own.go_back(8)
    assert torch.equal(rows(trainer), known)


def test_a_state_tensor_that_is_replaced_is_an_obstacle(trainer):
    trainer.train(1)
    state = trainer.optimizers[0].state[trainer.model["large"].weight]
    state["sum"] = state["sum"].clone()
    trainer.train(2)
    assert "table 'large'" in trainer.own.obstacle


class MakesStateLate(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("age", torch.zeros(len(parameter)))


def test_per_row_state_made_in_a_step_is_refused_by_name(begun):
    trainer = begun(make=partial(MakesStateLate, lr=0.1))
    with pytest.raises(UsageError, match=r"table 'large'.*per-row state \['age'\].*Create it bef"):
        trainer.train(1)


def test_a_small_table_is_recorded_as_a_whole_and_checksums_are_few(trainer):
    for group in trainer.optimizers[0].param_groups:
        group["weight_decay"] = 0.1  # it looks so, but refuses sparse gradients
    trainer.own.before_change(trainer.checkpointer.tables[0], torch.tensor([1]))
    assert trainer.own._changing.num_rows == ROWS
    checksums = RowChecksums(trainer.own.layout, trainer.checkpointer.tables)
    checksums.begin(0)
    assert checksums.of_state(0).numel() <= 8 * (4096 + 2)  # they do not grow with the table
