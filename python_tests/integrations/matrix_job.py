"""One rank of jobs that are killed, and resumed under other plans with other numbers of ranks.

A cell of the matrix is a job before the kill (plan, ranks, optimizer) and one after it. Many cells
share four processes: ``train`` trains all of a batch and kills itself, ``resume`` recovers them.
"""

import faulthandler
import os
import signal
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from cpr_ext.integrations.torchrec.sharded_tables import find_kernels, sharded_tables
from python_tests.helpers import open_checkpointer
from python_tests.integrations.sharded_models import (
    FUSED,
    TABLES,
    PooledDlrm,
    SmallDlrm,
    copy_parts,
    join,
    sharded,
    whole_tables,
)
from python_tests.integrations.sharded_models import train as train_steps

PLANS = (
    "table_wise", "row_wise", "column_wise", "table_row_wise", "grid", "data_parallel", "mixed",
    "planner",
)  # fmt: skip
# TorchRec cuts no EmbeddingCollection so, or FBGEMM 1.8.0 on the CPU pools what it should not.
POOLED_ONLY = {"grid", "planner", "data_parallel"}
MOST_RANKS, BATCHES = 4, 6
SAVED_STEPS, LOST_STEPS, MORE_STEPS = 3, 1, 2
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}
COUNTING = OPTIONS | {"priority": cpr_ext.MostFrequentlyUsed(1.0)}


@dataclass(frozen=True)
class Cell:
    old_plan: str
    old_ranks: int
    new_plan: str
    new_ranks: int
    fused: str

    @property
    def name(self):
        return "-".join(map(str, vars(self).values()))


def all_cells():
    """Every pair of plans; ranks and optimizers in turn."""
    names, cells = list(FUSED), []
    for index, (old, new) in enumerate(product(range(len(PLANS)), repeat=2)):
        ranks = 1 + (old + new) % MOST_RANKS, 1 + (old + 2 * new + 2) % MOST_RANKS
        fused = names[(index + index // BATCHES) % len(names)]
        cells.append(Cell(PLANS[old], ranks[0], PLANS[new], ranks[1], fused))
    return cells


def cells_of(batch):
    """Batch 0 is a sample of the whole."""
    return all_cells()[batch::BATCHES]


def build(cell, plan, world_size, seed):
    """Tables that the plan replicates have the optimizer that others have in backward."""
    hosts = 2 if world_size == 4 else 1
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // hosts)
    pooled_only = POOLED_ONLY & {cell.old_plan, cell.new_plan}
    model = PooledDlrm() if pooled_only else SmallDlrm()
    env = sharding_env(dist.group.WORLD)  # not all four ranks take part
    options = {"seed": seed, "model": model, "hosts": hosts, "env": env}
    return sharded(plan, cell.fused, same_optimizer=True, **options)


def started(folder, rank):
    log = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(200, exit=True)  # of a rank that waits for another
    return Path(folder)


def train(folder, rank, batch):
    """Train the jobs of a batch, save, train on without saving, and die."""
    directory, alive = started(folder, rank), []
    for cell in cells_of(batch):
        if rank >= cell.old_ranks:
            continue
        at = directory / cell.name
        at.mkdir(exist_ok=True)
        join(at / "meeting-old", rank, cell.old_ranks)
        parallel, optimizer = build(cell, cell.old_plan, cell.old_ranks, seed=0)
        options = {"save_at_close": False, "make": make_checkpointer, **COUNTING}
        ckpt = open_checkpointer(parallel, optimizer, at / f"old-{rank}", **options)
        alive.append(ckpt)
        train_steps(parallel, optimizer, ckpt, 1)
        ckpt.wait()  # the base, which takes the lookups of the first step
        train_steps(parallel, optimizer, ckpt, SAVED_STEPS - 1)
        counts = [torch.tensor(ckpt._trackers[t.name].counts()).long() for t in ckpt.tables]
        ckpt.save("base").wait_until_done()
        found = {**held(parallel, optimizer, ckpt), "counts": counts}
        torch.save(found, at / f"truth-{rank}.pt")
        train_steps(parallel, optimizer, ckpt, LOST_STEPS)
        dist.destroy_process_group()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(folder, rank, batch):
    """Recover each job under its new plan, train it further, and leave what it held."""
    directory = started(folder, rank)
    for cell in cells_of(batch):
        if rank >= cell.new_ranks:
            continue
        at = directory / cell.name
        join(at / "meeting-new", rank, cell.new_ranks)
        parallel, optimizer = build(cell, cell.new_plan, cell.new_ranks, seed=1)
        old = [at / f"old-{number}" for number in range(cell.old_ranks)]
        with make_checkpointer(parallel, optimizer, at / f"new-{rank}", **OPTIONS) as ckpt:
            report = recover(ckpt, old)
            recovered = held(parallel, optimizer, ckpt)
            train_steps(parallel, optimizer, ckpt, MORE_STEPS)
            ended = held(parallel, optimizer, ckpt)
        ended_by_hand = by_hand(cell, at, recovered)
        found = {"step": report.step, "recovered": recovered, "ended": ended}
        torch.save({**found, "ended_by_hand": ended_by_hand}, at / f"resumed-{rank}.pt")
        dist.destroy_process_group()


def recover(ckpt, old):
    """A strict recovery; what has no bits under the new plan is refused, and becomes a mean."""
    try:
        return ckpt.recover(from_store=old)
    except cpr_ext.errors.StoreError as error:
        if "has one value for the columns" not in str(error):
            raise
    return ckpt.recover(from_store=old, strict=False)


def by_hand(cell, at, recovered):
    """What the job ends with if its state is copied into it without cpr_ext."""
    parallel, optimizer = build(cell, cell.new_plan, cell.new_ranks, seed=2)
    tables = sharded_tables(find_kernels(parallel))
    for table, (part, arrays) in zip(tables, recovered["parts"], strict=True):
        assert table.part == part
        for name, array in table.arrays().items():
            array.copy_(arrays[name])
    truth = torch.load(at / "truth-0.pt", weights_only=False)
    parameters = named(parallel)
    with torch.no_grad():
        for name, value in truth["dense"].items():
            if name in parameters:
                parameters[name].copy_(value)
        for name, arrays in recovered["replicated"].items():
            parameters[name].copy_(arrays["weight"])
    moments = {**truth["moments"], **recovered["replicated"]}
    for _, inner in optimizer.optimizers:
        for name, parameter in inner.params.items():
            if name in moments:
                inner.state[parameter] = {
                    key: value.clone() for key, value in moments[name].items() if key != "weight"
                }
    train_steps(parallel, optimizer, None, MORE_STEPS, first=SAVED_STEPS)
    return held(parallel, optimizer, None)


def named(parallel):
    """Parameters of the model that are no part of a table, by their names in its state_dict()."""
    return {
        name: value
        for name, value in parallel.state_dict(keep_vars=True).items()
        if type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter)
    }


def held(parallel, optimizer, ckpt):
    """What a rank holds: its parts, replicated tables, dense parameters, and their moments."""
    tables = ckpt.tables if ckpt is not None else sharded_tables(find_kernels(parallel))
    parameters, moments = named(parallel), {}
    for _, inner in optimizer.optimizers:
        for name, parameter in inner.params.items():
            state = inner.state.get(parameter, {})
            if name in parameters:
                moments[name] = {k: torch.as_tensor(v).clone() for k, v in state.items()}
    replicated = {
        name: {"weight": value.detach().clone(), **moments.pop(name, {})}
        for name, value in parameters.items()
        if "embedding" in name
    }
    return {
        "parts": copy_parts(tables),
        "replicated": replicated,
        "dense": {n: v.detach().clone() for n, v in parameters.items() if n not in replicated},
        "moments": moments,
    }


def whole(results):
    """The tables of all ranks, laid together; a replicated one is that of each rank."""
    tables = whole_tables([part for result in results for part in result["parts"]])
    for name, arrays in results[0]["replicated"].items():
        columns = arrays["weight"].shape[1]
        found = tables.setdefault(name.removesuffix(".weight"), {})
        for key, value in arrays.items():
            if key == "sum" and value.shape[1] != columns:
                found[f"sum[0:{columns}]"] = value[:, 0]
            elif value.dim() == 2:
                found[key] = value
    assert len(tables) <= len(TABLES)
    return tables
