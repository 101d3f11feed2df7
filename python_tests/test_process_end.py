"""A program that ends without close(): it ends well, whatever the library's threads are at."""

import pytest

from python_tests.helpers import run_python

PROGRAM = """
import sys, tempfile
import torch
from torch import nn
import cpr_ext

torch.set_num_threads(1)
model = nn.EmbeddingBag(300_000, 16, sparse=True)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
options = {
    "capture": {"overlap": "always", "consistency": "step"},
    "commit": {"overlap": "never", "consistency": "step"},
    "compact": {"overlap": "never", "consistency": "step", "compact_after": 0.01},
}[sys.argv[1]]
checkpointer = cpr_ext.Checkpointer(
    model, optimizer, sys.argv[2], schedule=cpr_ext.EverySteps(1), when_busy="wait",
    priority=cpr_ext.AllRows(), **options,
)
for _ in range(4):
    model(torch.randint(0, 300_000, (64, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.step()
print(checkpointer._saver.in_flight.state)
"""


@pytest.mark.parametrize("at", ["capture", "commit", "compact"])
def test_a_program_ends_well_that_does_not_close(tmp_path, at):
    for attempt in range(2):
        assert run_python(PROGRAM, at, tmp_path / f"store{attempt}").strip() in (
            "capturing",
            "captured",
            "committed",
        )
