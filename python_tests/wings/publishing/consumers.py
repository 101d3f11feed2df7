"""Consumers: of changed rows, as plain as can be; and tables that a Subscriber keeps."""

import torch
from torch import nn

from cpr_ext.wings.publishing import changed_rows
from python_tests.helpers import same_bits
from python_tests.wings.tools.maintenance.stores import TABLES, recovered


class Consumer:
    """Holds rows, and the position up to which it has applied changes."""

    def __init__(self, sizes):
        self.sizes = sizes  # rows of each table
        self.tables = {name: {} for name in sizes}
        self.position = None

    def follow(self, store, *, on_gap="copy"):
        changes = changed_rows(store, self.position, states=True, on_gap=on_gap)
        for batch in changes:
            self.apply(batch)
        self.position = changes.until
        return changes

    def apply(self, batch):
        held = self.tables[batch.table]
        for name, values in batch.arrays.items():
            if name not in held:
                held[name] = torch.zeros(
                    (self.sizes[batch.table], *values.shape[1:]), dtype=values.dtype
                )
            held[name][batch.row_ids] = values

    def differences(self, rows):
        """Names of the tables' arrays that are not bit for bit as in ``rows``, named by path."""
        found = []
        for table, arrays in rows.items():
            for name, values in arrays.items():
                held = self.tables[table].get(name)
                if held is None or not same_bits(held, values.cpu()):
                    found.append(f"{table}/{name}")
        return found


def served():
    """Tables of a serving process, which has never trained."""
    return {f"tables.{n}": nn.EmbeddingBag(rows, dim) for n, (rows, dim) in TABLES.items()}


def weights(tables):
    return {name: module.weight.detach().clone() for name, module in tables.items()}


def train_and_save(trained, steps=2):
    trained.train(steps)
    trained.checkpointer.save()
    trained.checkpointer.wait()


def assert_serves_what_recovery_restores(tables, trained):
    trained.die()
    _, rows, _ = recovered(trained.store.directory)
    for name, arrays in rows.items():
        assert same_bits(tables[name].weight.detach(), arrays["weight"]), name
