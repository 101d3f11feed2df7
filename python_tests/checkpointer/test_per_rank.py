"""State that each process of a job has for itself: ``PerRank``."""

import pytest
import torch
from torch import nn

import cpr_ext
from cpr_ext import PerRank
from cpr_ext.errors import UntrackedChangeWarning
from cpr_ext.state.dense_state import own_part, restore_own_part
from cpr_ext.state.table_part import TablePart
from python_tests.file_reader import Reader
from python_tests.helpers import open_checkpointer
from python_tests.tracking.watched import NEVER


class Process:
    """A process of a job, which reads files of its own."""

    def __init__(self, directory, rank, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.reader, self.scheduler = Reader(rank), Reader(-1)
        state = {
            "scheduler": self.scheduler,
            "reader": PerRank(self.reader),
            "file": PerRank(lambda: f"part-{rank}"),
            "epoch": lambda: 10 + rank,
        }
        options = {**NEVER, "state": state, "save_at_close": False, **options}
        self.ckpt = open_checkpointer(self.model, self.optimizer, directory, **options)

    def train(self, steps):
        for _ in range(steps):
            self.reader.offset += 100
            self.scheduler.offset += 1
            self.model(torch.tensor([[1, 2]])).sum().backward()
            self.optimizer.step()
            self.ckpt.step()
        self.ckpt.save("base")
        self.ckpt.wait()
        return self


@pytest.fixture
def pair(tmp_path):
    processes = [Process(tmp_path / str(rank), rank).train(2 + rank) for rank in range(2)]
    yield processes
    for each in processes:
        each.ckpt.close()


def test_what_is_rebuilt_from_peers_has_its_own_state_and_a_survivor_keeps_its_own(pair):
    ckpt = pair[1].ckpt
    given = (pair[1].model, [pair[1].optimizer], ckpt.tables, ckpt.declared)
    own = own_part(ckpt.session.whole_part(), *given)
    assert [*own.tree()["state"]] == ["reader"]
    values = pair[0].ckpt.load_replicated_state(ckpt.replicated_state(), generators=False)
    assert values == {"file": "part-0", "epoch": 11}
    assert pair[0].reader.state_dict() == {"rank": 0, "offset": 200}
    assert pair[0].scheduler.offset == 3
    assert pair[0].ckpt.step_count == 3
    pair[1].reader.offset, pair[1].scheduler.offset = -1, -1
    restore_own_part(own, *given)
    assert pair[1].reader.state_dict() == {"rank": 1, "offset": 300}
    assert pair[1].scheduler.offset == -1  # all workers have it


def test_a_store_of_one_process_gives_its_own_state(pair, tmp_path):
    for each in pair:
        each.ckpt.close()
    alone = Process(tmp_path / "new", 7)
    report = alone.ckpt.recover(from_store=[tmp_path / "0"])
    assert (alone.reader.rank, report.state["file"], report.differences) == (0, "part-0", [])


def test_parts_of_several_processes_leave_it_alone(tmp_path):
    def table(rows):
        part = TablePart("t", rows, (0, 4), 10, 4)
        return cpr_ext.Table(str(part), nn.Parameter(torch.ones(rows[1] - rows[0], 4)), part=part)

    def process(name, rank, rows):
        return Process(tmp_path / name, rank, tables=[table(rows)])

    for rank, rows in enumerate([(0, 5), (5, 10)]):
        process(str(rank), rank, rows).train(2).ckpt.close()
    whole = process("whole", 7, (0, 10))
    with pytest.warns(UntrackedChangeWarning, match="PerRank state is not taken"):
        report = whole.ckpt.recover(from_store=[tmp_path / "0", tmp_path / "1"])
    assert whole.reader.state_dict() == {"rank": 7, "offset": 0}
    assert whole.scheduler.offset == 2
    assert report.state == {"epoch": 10}
    assert len(report.differences) == 1
    whole.ckpt.close()
