"""A new store's Checkpointer makes the memory of counts and hashes; one that resumes does not."""

import resource
from pathlib import Path

import torch
from torch import nn

import cpr_ext

ROWS = 8 << 20
# Four bytes of counts per row, and two of hashes.
MADE_BYTES = 6 * ROWS


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_made_for_a_new_store_only(tmp_path):
    table = nn.EmbeddingBag(ROWS, 1, sparse=True, _weight=torch.ones(ROWS, 1))
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    grown = []
    for _ in range(2):
        before = resident_bytes()
        with cpr_ext.Checkpointer(table, optimizer, tmp_path) as checkpointer:
            grown.append(resident_bytes() - before)
            if not grown[1:]:
                checkpointer.save("base")
                checkpointer.wait()
    new, resumed = grown
    assert new - resumed > MADE_BYTES / 2
