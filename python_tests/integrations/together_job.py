"""Ranks of an ordinary process group, which all restart together: the first snippet of torchrec.md.

Each rank writes what it recovered to ``RANK-LIFE.json``, where it ended to ``end-RANK-LIFE.json``.
"""

import json
import os
import signal
import warnings
from pathlib import Path

import torch

import cpr_ext
from cpr_ext.distributed import recover_together
from cpr_ext.distributed.collective.comparison import checksum, facts_of
from cpr_ext.integrations.torchrec import make_checkpointer
from cpr_ext.storage.retention import Retention
from python_tests.file_reader import Reader
from python_tests.helpers import open_checkpointer
from python_tests.integrations.sharded_models import SAMPLES, make_batch, sharded

STEPS = 9
# Full-recovery points at the same steps everywhere.
EXACT = {
    "schedule": cpr_ext.EverySteps(2, when_busy="wait"), "priority": cpr_ext.AllRows(),
    "store": cpr_ext.StoreOptions(retention=Retention(full_recovery_points=3)),
}  # fmt: skip


def die_at_rename(number):
    """Before the manifest that this process would replace as that of this number."""
    left, rename = [number], Path.replace

    def replace(path, target):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    Path.replace = replace


def run(directory, rank, life, by_rank):
    """One life of a TorchRec job."""
    dies_at, mode, num_steps = by_rank[rank]
    torch.manual_seed(rank)  # nobody else sees to it that replicas are the same
    model, optimizer = sharded("row_wise", "rowwise_adagrad", seed=10 * life + rank)
    # Ranks save when they are ready: here at steps of their own, if they may.
    options = EXACT if mode == "full" else {"schedule": cpr_ext.EverySteps(2 + rank)}
    store = directory / f"store-{rank}"
    with make_checkpointer(model, optimizer, store, **options) as checkpointer:
        report = checkpointer.recover(mode=mode)
        facts = facts_of(model, checkpointer, buffers=True)
        said = {"step": report.step, "samples": report.num_samples, "lost": report.samples_lost}
        (directory / f"{rank}-{life}.json").write_text(json.dumps({**said, "facts": facts}))
        if dies_at is not None:
            die_at_rename(dies_at)
        for step in range(report.step, report.step + num_steps):
            inputs, _ = make_batch(step, rank)
            optimizer.zero_grad()
            model(*inputs).backward()
            optimizer.step()
            checkpointer.step(SAMPLES * len(by_rank))
            checkpointer.wait()
        end = {"facts": facts_of(model, checkpointer, buffers=True)}
        end["tables"] = [
            {name: checksum(array) for name, array in table.arrays().items()}
            for table in checkpointer.tables
        ]
        (directory / f"end-{rank}-{life}.json").write_text(json.dumps(end))


def run_plain(directory, rank, life, by_rank):
    """An ordinary Checkpointer, at a step of its own; each rank reads files of its own.

    By rank: how many steps; whether it says that these are its own; whether a table is replicated.
    """
    steps, owns, is_replicated = by_rank[rank]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(10, 4), torch.nn.Linear(4, 1))
    if is_replicated:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader, draws, at = Reader(rank), torch.Generator().manual_seed(rank), [0]
    state = {"reader": reader, "draws": draws, "file": lambda: f"part-{rank}-{at[0]}"}
    mark = cpr_ext.PerRank if owns else lambda each: each
    state = {name: mark(each) for name, each in state.items()}
    store = directory / f"store-{rank}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with open_checkpointer(
            model, optimizer, store, state=state, save_at_close=False
        ) as checkpointer:
            report = recover_together(checkpointer)
            said = {
                "step": report.step,
                "lost": report.samples_lost,
                "stale": report.rows_stale,
                "reader": reader.state_dict(),
                "file": report.state.get("file"),
                "differences": report.differences,
                "warnings": [str(each.message) for each in caught],
                "draw": torch.randint(0, 1000, (4,), generator=draws).tolist(),
            }
            (directory / f"{rank}-{life}.json").write_text(json.dumps(said))
            for step in range(report.step, report.step + steps):
                reader.offset += 100 + rank
                model(torch.tensor([[1, 2]])).sum().backward()
                optimizer.step()
                at[0] = step + 1
                checkpointer.step()
            checkpointer.save("base").wait_until_done()
