"""What the loss of live shards is said to cost: the rows and updates that were lost, or None."""

import torch

import cpr_ext
from cpr_ext.wings.tools.maintenance import read_rows

ROWS, SHARDS = 400, 4


class Delayed(torch.optim.Adagrad):
    """Nobody knows what a subclass does in its step."""


class Loop:
    def __init__(self, directory, optimizer=torch.optim.Adagrad):
        torch.manual_seed(0)
        self.model = torch.nn.EmbeddingBag(ROWS, 4, sparse=True)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.directory = directory
        never = cpr_ext.EverySteps(10**6)
        self.ckpt = cpr_ext.Checkpointer(
            self.model, self.optimizer, directory, num_shards=SHARDS, schedule=never
        )
        self.ckpt.recover()
        # By lookups, since the last base snapshot.
        self.updates = torch.zeros(ROWS, dtype=torch.int64)

    def train(self, steps):
        for _ in range(steps):
            ids = torch.randint(0, ROWS, (8, 2))
            self.optimizer.zero_grad()
            self.model(ids).sum().backward()
            self.optimizer.step()
            self.updates += torch.bincount(ids.flatten(), minlength=ROWS)
            self.ckpt.step(8)

    def save(self):
        self.ckpt.save("base").wait_until_done()
        self.updates.zero_()

    def lose(self, shard):
        """Overwrite the rows of a shard; return what is true of them, and what is reported."""
        begin, end = shard * ROWS // SHARDS, (shard + 1) * ROWS // SHARDS
        saved = read_rows(self.directory, "embedding", range(begin, end)).arrays
        state = self.optimizer.state[self.model.weight]
        different = torch.zeros(end - begin, dtype=torch.bool)
        for name, values in saved.items():
            live = self.model.weight.detach() if name == "weight" else state[name]
            different |= (values != live[begin:end]).any(1)
        true = int(different.sum()), int(self.updates[begin:end].sum())
        with torch.no_grad():
            self.model.weight[begin:end] = 0
        report = self.ckpt.recover(shards=[shard])
        return true, (report.rows_stale, report.row_updates_lost)


def saved_loop(*given):
    loop = Loop(*given)
    loop.train(5)
    loop.save()
    return loop


def test_one_loss_after_another_counts_its_own_rows_only(tmp_path):
    loop = saved_loop(tmp_path)
    loop.train(3)
    for shard in range(SHARDS):
        true, said = loop.lose(shard)
        assert said == true
    assert loop.ckpt.metrics.row_updates_lost == loop.updates.sum()


def test_counts_of_an_optimizer_that_nobody_knows_are_unknown(tmp_path):
    loop = saved_loop(tmp_path, Delayed)
    loop.train(3)
    assert loop.lose(0)[1] == (None, None)
    assert loop.ckpt.metrics.row_updates_lost is None
