"""Keys of keyed tables under parity: on the way back, in deltas, and at a replacement."""

import pytest
import torch

import cpr_ext
from cpr_ext.distributed.parity.own_rows import KeyCopies, OwnRows
from cpr_ext.errors import UsageError
from cpr_ext.state.table import Table
from cpr_ext.wings.tools.maintenance import inspect
from python_tests.distributed.parity.members import Trainer
from python_tests.keyed_job import SLOTS, KeyedJob

STEPS = 30  # after which ids have been evicted


class KeyedTrainer(KeyedJob):
    """A job with scores, and its parity's listener."""

    def __init__(self, directory, *, parts=1, stride=1, seed=0, **options):
        super().__init__(directory, seed=seed, **{"scores": True, **options})
        how = {"parts": parts, "delta_bytes": 1 << 20, "stride": stride}
        self.own = OwnRows(self.ckpt, wait=lambda: None, **how)

    def step(self, ids):
        super().step(ids)
        self.own.finish_step(self.ckpt.step_count)

    words = Trainer.words

    def all(self):
        """All that decides what the map and the rows do next."""
        slots = self.map
        return self.rows(), slots.key.tolist(), slots.used.tolist(), dict(slots.slots), slots.clock


@pytest.fixture(params=[1])
def trainer(request, tmp_path):
    made = KeyedTrainer(tmp_path / "store", stride=request.param)
    made.own.begin(0)
    return made


def trained(trainer, num_steps):
    known = {}
    for _ in range(num_steps):
        trainer.train(1)
        known[trainer.ckpt.step_count] = trainer.all()
    return known


def tear(trainer):
    """New ids of a step that is not complete."""
    _, new = trainer.map([1, 2, 10**15])
    with trainer.ckpt.writing_rows("items", new), torch.no_grad():
        trainer.weight[new] = 7.0


@pytest.mark.parametrize("trainer", [1, 4], indirect=True)  # the steps of a delta
def test_an_abandoned_step_leaves_the_ids_of_the_last_complete_one(trainer):
    known = trained(trainer, STEPS)
    tear(trainer)
    trainer.own.abandon_step()
    assert trainer.all() == known[STEPS]


def test_evictions_since_a_snapshot_that_was_dropped_are_not_counted(trainer, tmp_path):
    def saved():
        trainer.ckpt.save()
        trainer.ckpt.wait()
        (keys,) = inspect(tmp_path / "store").keys
        return keys.evicted

    trained(trainer, 22)  # the newest snapshot is of step 21
    assert saved() == len(trainer.keys_at[21] - trainer.keys_at[22]) > 0
    trained(trainer, 1)
    trainer.own.go_back(21)
    trained(trainer, 1)
    assert saved() is None
    trained(trainer, 2)
    assert saved() == len(trainer.keys_at[22] - trainer.keys_at[24]) > 0


def test_a_changed_bit_of_a_score_is_seen_whatever_its_type():
    weight = torch.nn.Parameter(torch.zeros(6, 2))
    scores = {
        "float": torch.zeros(6), "half": torch.zeros(6, 3, dtype=torch.bfloat16),
        "bool": torch.zeros(6, dtype=torch.bool), "double": torch.zeros(6, dtype=torch.float64),
    }  # fmt: skip
    keys = cpr_ext.SlotKeys(torch.full((6,), -1), scores)
    copies = KeyCopies([Table("items", weight, keys=keys)])
    seen = []

    def noted():
        seen.clear()
        copies.take(lambda number, slots: seen.append((number, slots.tolist())))
        return seen

    assert noted() == []
    scores["float"][1] = -0.0  # equal to what it was, and has other bits
    scores["half"][2, 1] = 1.0
    scores["bool"][3] = True
    scores["double"][4] = float("nan")
    keys.key[1] = 9
    assert noted() == [(0, [1, 2, 3, 4])]
    assert noted() == []


def test_scores_that_are_added_during_training_are_refused(trainer):
    slots = trainer.ckpt.tables[0].slots
    slots.scores["late"] = torch.zeros(SLOTS)
    with pytest.raises(UsageError, match=r"'items'.*key\.late.*Give SlotKeys all of them before"):
        trainer.own.finish_step(1)
