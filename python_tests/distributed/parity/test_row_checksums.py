"""Rows that something else than their optimizer changed are found, and named."""

import pytest
import torch

from cpr_ext.distributed.parity.own_rows import RowChecksums
from python_tests.distributed.parity.members import Trainer


@pytest.mark.parametrize("stride", [1, 2])
def test_a_worker_finds_what_changed_unseen_before_any_of_its_newest_steps(tmp_path, stride):
    trainer = Trainer(tmp_path, stride=stride)
    trainer.own.begin(0)
    for step in range(1, 7):
        if step == 5:
            trainer.model["large"].weight.data[17] += 1.0  # PyTorch does not count it
        trainer.train(step)
    trainer.own.find_wrong_rows()
    assert "table 'large', among rows 17 to 17" in trainer.own.obstacle
    trainer.own.begin(6)
    assert trainer.own.obstacle == ""


def test_steps_that_are_undone_and_made_again_are_no_obstacle(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.own.begin(0)
    for step in range(1, 5):
        trainer.train(step)
    trainer.own.go_back(2)
    trainer.own.find_wrong_rows()
    for step in (3, 4, 5):
        trainer.train(step)
    trainer.own.find_wrong_rows()
    assert trainer.own.obstacle == ""
    trainer.model["small"].weight.data.zero_()
    trainer.own.find_wrong_rows()
    assert "table 'small', among rows 0 to 0, and 6 more blocks" in trainer.own.obstacle


def test_rebuilt_rows_that_are_not_those_of_the_state_are_refused(tmp_path):
    lost, replacement = (Trainer(tmp_path / str(n), seed=n) for n in (1, 2))
    lost.own.begin(0)
    lost.train(1)
    kept, whole = lost.own.to_keep(1), lost.own.whole_copy(1)
    before = replacement.dense()
    everything = [(0, lost.own.layout.num_words)]
    replacement.own.restore(1, whole, kept, everything)
    assert "rebuilt rows differ from their checksums: table 'large'" in replacement.own.obstacle
    assert replacement.dense() == before
    for part, words in enumerate(lost.own.part_words):
        copy = torch.zeros(words, dtype=torch.int64)
        lost.own.read(1, part, 0, copy)
        replacement.own.write(part, 0, copy)
    replacement.own.restore(1, whole, kept, everything)
    assert (replacement.own.obstacle, replacement.checkpointer.step_count) == ("", 1)
    replacement.train(2)
    replacement.own.find_wrong_rows()
    assert replacement.own.obstacle == ""


def test_their_size_does_not_grow_with_the_table(tmp_path):
    trainer = Trainer(tmp_path)
    checksums = RowChecksums(trainer.own.layout, trainer.checkpointer.tables)
    checksums.begin(0)
    assert checksums.of_state(0).numel() <= 8 * (4096 + 2)
