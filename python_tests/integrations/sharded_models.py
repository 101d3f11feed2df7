"""A small TorchRec model, cut by any plan, for tests that train it on one rank or two."""

import importlib
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, ShardingEnv, comm, sharding_plan
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.helpers import assert_same, differences, open_checkpointer

torch.set_num_threads(1)

# Marks of tests in a process that is a group of one rank.
ALONE = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore"),  # TorchRec's and FBGEMM's own, by the dozen
]
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}

# table -> (rows, dim, features)
POOLED = {
    "a": (20, 8, ("a0", "a1")),
    "b": (23, 16, ("b0",)),
    "c": (31, 8, ("c0",)),
    "d": (2, 8, ("d0",)),
}
SEQUENCE = {"s": (29, 8, ("s0",))}
TABLES = {**POOLED, **SEQUENCE}
NAMES = {
    **{name: f"bags.embedding_bags.{name}" for name in POOLED},
    **{name: f"sequences.embeddings.{name}" for name in SEQUENCE},
}
PLANS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "mixed")
FUSED = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
LEARNING_RATE = 0.1
SAMPLES = 4


class PooledDlrm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=_configs(EmbeddingBagConfig, POOLED))
        width = sum(dim * len(features) for _, dim, features in POOLED.values())
        self.linear = torch.nn.Linear(width, 1)

    def forward(self, pooled, sequences):
        return self.linear(self.bags(pooled).values()).sin().mean()


class SmallDlrm(PooledDlrm):
    def __init__(self):
        super().__init__()
        self.sequences = EmbeddingCollection(tables=_configs(EmbeddingConfig, SEQUENCE))

    def forward(self, pooled, sequences):
        rows = self.sequences(sequences)["s0"].values()
        return super().forward(pooled, sequences) + rows.sin().sum()


def _configs(kind, tables):
    return [
        kind(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))
        for name, (rows, dim, features) in tables.items()
    ]


def run_rank(module, name, meeting, directory, rank, world_size, *arguments):
    """Call ``name(directory, rank, *arguments)`` in the group; what it returns is left there."""
    directory = Path(directory)
    log = os.open(directory / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    join(meeting, rank, world_size)
    result = getattr(importlib.import_module(module), name)(directory, rank, *arguments)
    torch.save(result, directory / f"{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def join(path, rank=0, world_size=1):
    """Make the process group of all ranks, which meet at the file ``path``."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    comm._INTRA_PG = comm._CROSS_PG = None  # those of an earlier group are destroyed
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)


def sharded(
    plan, fused="adagrad", *, seed=0, replicated=(), model=None, env=None, hosts=1,
    same_optimizer=False, **options
):  # fmt: skip
    """The model on all ranks of the group, its tables cut by ``plan``, and its optimizer.

    Args:
        replicated: names of tables that every rank holds whole (data parallel).
        hosts: over which table-row-wise and grid plans spread the tables.
        same_optimizer: replicated tables have the kind of optimizer that others have in backward.
        options: of DistributedModelParallel.
    """
    torch.manual_seed(seed)
    model = model or SmallDlrm()
    if plan == "data_parallel":
        replicated = tuple(TABLES)
    for name, parameter in model.named_parameters():
        if "embedding" in name and name.split(".")[-2] not in replicated and fused:
            apply_optimizer_in_backward(FUSED[fused], [parameter], settings_of(fused))
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    modules = zip(("bags", "sequences"), (POOLED, SEQUENCE), sharders, strict=True)
    plans = _planned(model, sharders) if plan == "planner" else {
        name: construct_module_sharding_plan(
            getattr(model, name),
            {t: data_parallel() if t in replicated else _cut(plan, t, hosts) for t in tables},
            sharder=sharder,
            world_size=dist.get_world_size(),
            local_size=dist.get_world_size() // hosts,
            device_type="cpu",
        )
        for name, tables, sharder in modules
        if hasattr(model, name)
    }  # fmt: skip
    parallel = distributed(model, plans, sharders, env=env, **options)
    parameters = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    tables = {n: p for n, p in parameters.items() if same_optimizer and "embedding" in n}
    dense = {n: p for n, p in parameters.items() if n not in tables}
    optimizers = [parallel.fused_optimizer]
    if tables:
        optimizers.append(
            KeyedOptimizerWrapper(tables, lambda p: FUSED[fused](p, **settings_of(fused)))
        )
    optimizers.append(KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01)))
    return parallel, CombinedOptimizer(optimizers)


def distributed(model, plans, sharders, *, env=None, **options):
    """The model on all ranks, its modules cut by plans."""
    return DistributedModelParallel(
        model,
        env=env or ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan=plans),
        sharders=sharders,
        **options,
    )


def with_dense_adam(parallel):
    """A model on all ranks, and its optimizer: the fused one, and Adam for all else."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def settings_of(fused):
    return {"lr": LEARNING_RATE} | ({} if fused == "sgd" else {"eps": 1e-3})


def _planned(model, sharders):
    """What TorchRec's own planner chooses for so many ranks of one host."""
    size = dist.get_world_size()
    topology = Topology(world_size=size, local_world_size=size, compute_device="cpu")
    return EmbeddingShardingPlanner(topology=topology).plan(model, sharders).plan


def _cut(plan, table, hosts):
    number, last = list(TABLES).index(table), dist.get_world_size() - 1
    if plan == "mixed":
        plan = ("table_row_wise", "column_wise", "table_wise", "table_wise", "row_wise")[number]
    if table in SEQUENCE and plan == "table_row_wise":
        plan = "row_wise"  # TorchRec cuts an EmbeddingCollection in no such way
    if TABLES[table][0] <= last and plan in ("row_wise", "table_row_wise", "grid"):
        # FBGEMM 1.8.0 on the CPU reads behind its list of tables where the last one has no rows.
        plan = "table_wise"
    return {
        "table_wise": lambda: table_wise(rank=number % (last + 1)),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=[0, last]),
        "table_row_wise": lambda: table_row_wise(host_index=number % hosts),
        "grid": lambda: partial(_grid, hosts),
    }[plan]()


def _grid(hosts, parameter, local_size, world_size, device_type, sharder):
    """Columns cut over hosts, rows over the ranks of each: ``grid_shard`` cuts at 128 columns."""
    (rows, columns), block = parameter.shape, parameter.shape[1] // hosts
    per_rank, cuts = -(-rows // local_size), []
    for rank in range(world_size):
        host, local = divmod(rank, local_size)
        begin = min(local * per_rank, rows)
        size = [min(per_rank, rows - begin), block]
        cuts.append((size, [begin, host * block], rank))
    assert columns == hosts * block
    return sharding_plan._get_parameter_sharding(
        parameter, ShardingType.GRID_SHARD.value, cuts, local_size, device_type, sharder
    )


def make_batch(step, rank=0):
    """(pooled, sequences) of one rank's samples of a step, and the row ids by table."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    looked_up, inputs = {}, []
    for tables in (POOLED, SEQUENCE):
        keys, values, lengths = [], [], []
        for name, (rows, _, features) in tables.items():
            for feature in features:
                bags = torch.randint(0, 4, (SAMPLES,), generator=generator)
                draws = torch.rand(int(bags.sum()), generator=generator) ** 2
                keys.append(feature)
                values.append((draws * rows).long())
                lengths.append(bags)
                looked_up.setdefault(name, []).append(values[-1])
        inputs.append(KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths)))
    return inputs, {name: torch.cat(ids) for name, ids in looked_up.items()}


def train(parallel, optimizer, checkpointer, num_steps, first=None):
    """Steps whose lookups depend on their number and rank alone.

    Args:
        first: number of the first one, without a checkpointer; None: all are number 0.
    """
    for index in range(num_steps):
        step = 0 if first is None else first + index
        step = checkpointer.step_count if checkpointer is not None else step
        inputs, _ = make_batch(step, dist.get_rank())
        optimizer.zero_grad()
        parallel(*inputs).backward()
        optimizer.step()
        if checkpointer is not None:
            checkpointer.step(SAMPLES)


def lookups_of(steps, world_size):
    """How often each row of each table is looked up in these steps by all ranks together."""
    counts = {name: torch.zeros(rows, dtype=torch.int64) for name, (rows, *_) in TABLES.items()}
    for step in steps:
        for rank in range(world_size):
            for name, ids in make_batch(step, rank)[1].items():
                counts[name] += torch.bincount(ids, minlength=len(counts[name]))
    return counts


def opened(parallel, optimizer, store, **options):
    """A Checkpointer that saves all rows, and only when it is told to."""
    options = {**OPTIONS, "save_at_close": False, "make": make_checkpointer, **options}
    return open_checkpointer(parallel, optimizer, store, **options)


def require_resumes(folder, start, *, saved=3, steps=7, is_late=False):
    """A job that was cut off a step after it had saved ends in the bits of one that was not.

    Args:
        start: takes a seed; returns the model, its optimizer, and what trains the step of a number.
        is_late: a step's change of the dense part is applied in the next one.
    """
    ends, known = [], None
    for name, stops in (("whole", [steps]), ("cut off", [saved, steps])):
        for seed, stop in enumerate(stops):
            parallel, optimizer, train_step = start(seed)
            with opened(parallel, optimizer, folder / name) as checkpointer:

                def train(until, checkpointer=checkpointer, train_step=train_step):
                    while checkpointer.step_count < until:
                        train_step(checkpointer.step_count)
                        checkpointer.step(SAMPLES)

                checkpointer.recover()
                if seed:
                    assert checkpointer.step_count == saved
                    assert_same([held(checkpointer), dense_of(parallel)], known)
                train(stop)
                known = [held(checkpointer), dense_of(parallel)]
                if stop == saved:
                    checkpointer.save("partial").wait_until_done()
                    train(saved + 1)
        ends.append(known)
    whole, cut_off = ends
    assert whole[1]
    assert is_late or differences(whole, cut_off) == []


def kernels_of(parallel):
    return [
        inner.emb_module
        for module in parallel.modules()
        if hasattr(module, "_lookups")
        for lookup in module._lookups
        for inner in getattr(lookup, "module", lookup)._emb_modules
    ]


def held(checkpointer):
    return whole_tables(copy_parts(checkpointer.tables))


def dense_of(parallel):
    """What the ranks have alike, by name."""
    return {
        name: value.detach().clone()
        for name, value in parallel.state_dict().items()
        if type(value) in (torch.Tensor, torch.nn.Parameter)
    }


def copy_parts(tables):
    """What a rank holds: part and copied arrays of each table."""
    return [(t.part, {name: a.clone() for name, a in t.arrays().items()}) for t in tables]


def whole_tables(parts):
    """The tables laid together from the parts of all ranks, by name and array.

    State of one value per row appears once for each range of columns: ``sum[0:4]``.
    """
    tables = {}
    for part, arrays in parts:
        whole = tables.setdefault(part.table, {})
        rows = slice(*part.rows)
        for name, array in arrays.items():
            if array.dim() == 2:
                shape = (part.num_embeddings, part.embedding_dim)
                target = whole.setdefault(name, torch.full(shape, float("nan")))
                target[rows, slice(*part.columns)] = array
            else:
                name = f"{name}[{part.columns[0]}:{part.columns[1]}]"
                target = whole.setdefault(name, torch.full((part.num_embeddings,), float("nan")))
                target[rows] = array
    return tables


def same_tables(first, second):
    """True if two results of ``whole_tables`` are the same in every bit, and complete."""
    return first.keys() == second.keys() and all(
        first[table].keys() == second[table].keys()
        and all(torch.equal(first[table][name], second[table][name]) for name in first[table])
        for table in first
    )
