"""Ranks of jobs with managed collisions: which state each id's row had, step by step.

FBGEMM's CPU build cannot reset the momentum of rows; this module does it in its place.
"""

import pickle
import warnings

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import cpr_ext
from cpr_ext import Retention, StoreOptions
from cpr_ext.errors import CprError, SnapshotFailedWarning, UntrackedChangeWarning
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.helpers import open_checkpointer
from python_tests.integrations.sharded_models import distributed, with_dense_adam

IDS = 2**50
SLOTS = {"a": 40, "b": 28}
POLICIES = {
    "lru": LRU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "distance": DistanceLFU_EvictionPolicy,
}
DIM, SAMPLES = 8, 8


class Model(torch.nn.Module):
    def __init__(self, policy, *, pooled=True):
        super().__init__()
        configs = [
            (EmbeddingBagConfig if pooled else EmbeddingConfig)(
                name=name, embedding_dim=DIM, num_embeddings=slots, feature_names=[f"{name}0"]
            )
            for name, slots in SLOTS.items()
        ]
        modules = {
            name: MCHManagedCollisionModule(
                zch_size=slots,
                device=torch.device("cpu"),
                eviction_interval=3,
                eviction_policy=POLICIES[policy](),
                input_hash_size=IDS,
            )
            for name, slots in SLOTS.items()
        }
        self.pooled = pooled
        collection = ManagedCollisionCollection(modules, configs)
        if pooled:
            embeddings = EmbeddingBagCollection(tables=configs)
            self.bags = ManagedCollisionEmbeddingBagCollection(embeddings, collection)
        else:
            embeddings = EmbeddingCollection(tables=configs)
            self.bags = ManagedCollisionEmbeddingCollection(embeddings, collection)
        self.linear = torch.nn.Linear(DIM * len(SLOTS), 1)

    def forward(self, ids):
        found, _ = self.bags(ids)
        if self.pooled:
            return self.linear(found.values()).sin().mean()
        return self.linear(torch.cat([rows.values() for rows in found.values()], 1)).sin().mean()


def reset_rows(operator, pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids):
    if operator.optimizer == EmbOptimType.EXACT_SGD:
        return
    states = operator.get_optimizer_state()[int(logical_table_ids[0])]
    for name, state in states.items():
        if name != "iter":
            state[pruned_indices] = 0


def sharded(policy, fused, seed=0, *, pooled=True, env=None):
    SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum = reset_rows
    torch.manual_seed(seed)
    model = Model(policy, pooled=pooled)
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            settings = {} if fused is torch.optim.SGD else {"eps": 1e-3}
            apply_optimizer_in_backward(fused, [parameter], {"lr": 0.1, **settings})
    sharder = (
        ManagedCollisionEmbeddingBagCollectionSharder()
        if pooled
        else ManagedCollisionEmbeddingCollectionSharder()
    )
    plan = construct_module_sharding_plan(
        model.bags,
        {name: row_wise() for name in SLOTS},
        sharder=sharder,
        world_size=dist.get_world_size(),
        local_size=dist.get_world_size(),
        device_type="cpu",
    )
    return with_dense_adam(distributed(model, {"bags": plan}, [sharder], env=env))


def make_batch(step, rank):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    values = []
    for _ in SLOTS:
        hot = torch.randint(0, 24, (SAMPLES // 2,), generator=draw) * (IDS // 24)
        values += [hot, torch.randint(0, IDS, (SAMPLES // 2,), generator=draw)]
    keys = [f"{name}0" for name in SLOTS]
    lengths = torch.ones(SAMPLES * len(SLOTS), dtype=torch.int64)
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=lengths)


def modules_of(model):
    collection = model.module.bags._managed_collision_collection
    return dict(collection._managed_collision_modules.items())


def buffers_of(model):
    """Return everything that decides what the modules do next."""
    return {
        f"{name}/{what}": value.clone()
        for name, module in modules_of(model).items()
        for what, value in [
            ("ids", module._mch_sorted_raw_ids),
            ("slots", module._mch_remapped_ids_mapping),
            *module._mch_metadata.items(),
            *(
                ("seen", seen[: module._current_history_buffer_offset])
                for seen in [getattr(module, "_history_accumulator", None)]
                if seen is not None
            ),
            *(
                (f"history_{n}", h[: module._current_history_buffer_offset])
                for n, h in module._history_metadata.items()
            ),
            ("iter", module._current_iter_tensor),
        ]
    }


class ManagedJob:
    """Trains; remembers the rows of each id, read from TorchRec's own buffers."""

    def __init__(
        self, directory, *, seed=0, policy="lru", fused=RowWiseAdagrad, pooled=True, **options
    ):
        self.model, self.optimizer = sharded(policy, fused, seed, pooled=pooled)
        given = {"save_at_close": False, "make": make_checkpointer, **options}
        given.setdefault("schedule", cpr_ext.EverySteps(5, when_busy="wait"))
        self.ckpt = open_checkpointer(self.model, self.optimizer, directory, **given)
        self.history, self.keys_at, self.num_reused = {}, {}, 0

    def modules(self):
        return modules_of(self.model)

    def rows(self):
        """Return the weight and states by table and id."""
        found = {}
        for name, module in self.modules().items():
            (table,) = (t for t in self.ckpt.tables if f".{name}" in t.name)
            slots = module._mch_remapped_ids_mapping - module._output_global_offset
            states = {n: s for n, s in table.arrays().items() if not n.startswith("key")}
            for key, slot in zip(module._mch_sorted_raw_ids.tolist(), slots.tolist(), strict=True):
                if key != torch.iinfo(torch.int64).max:
                    found[name, key] = {n: s[slot].tolist() for n, s in states.items()}
        return found

    def train(self, until):
        while self.ckpt.step_count < until:
            self.optimizer.zero_grad()
            self.model(make_batch(self.ckpt.step_count, dist.get_rank())).backward()
            self.optimizer.step()
            self.note(self.ckpt.step_count + 1, self.rows())
            self.ckpt.step(SAMPLES)

    def note(self, step, rows):
        """Remember the rows of a step, before it can be saved."""
        self.keys_at[step] = set(rows)
        for key, row in rows.items():
            self.history.setdefault(key, []).append(row)

    def end(self):
        self.ckpt.wait()
        self.ckpt.close()


CASES = {
    "partial": ("lru", {}),
    "lfu": ("lfu", {"priority": cpr_ext.SubSampledUsed()}),
    "distance": ("distance", {"priority": cpr_ext.AllRows(0.25), "num_shards": 2}),
}
EXACT = {"priority": cpr_ext.AllRows(), "store": StoreOptions(retention=Retention(3))}


def trained(directory, rank):
    """Train and recover a job of each case."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntrackedChangeWarning)
        result = {name: partial(directory, rank, name) for name in CASES}
        result["full"] = full(directory / f"full-{rank}")
    kinds = (UntrackedChangeWarning, SnapshotFailedWarning)
    result["warnings"] = [str(each.message) for each in caught if each.category in kinds]
    return result


def partial(directory, rank, name):
    """Train, end, recover; what is wrong with the recovered rows."""
    policy, options = CASES[name]
    store = directory / f"{name}-{rank}"
    options = {"store": StoreOptions(None), **options}
    job = ManagedJob(store, policy=policy, **options)
    job.train(48)
    job.end()
    again = ManagedJob(store, policy=policy, seed=1, **options)
    report = again.ckpt.recover()
    rows = again.rows()
    again.train(report.step + 7)
    again.end()
    return {
        "step": report.step,
        "rows_of_other_ids": report.rows_of_other_ids,
        "same_keys": rows.keys() == job.keys_at[report.step],
        "foreign": [key for key, row in rows.items() if row not in job.history[key]],
        "stale": sum(row != job.history[key][-1] for key, row in rows.items()),
        "num_keys": (len(rows), len(job.history)),
    }


def full(store):
    """Train with a kill in between, and without; what differs at the end."""
    job = ManagedJob(store, **EXACT)
    job.train(44)
    job.end()
    again = ManagedJob(store, seed=1, **EXACT)
    report = again.ckpt.recover(mode="full")
    again.train(50)
    other = ManagedJob(store.with_name(store.name + "-unbroken"), **EXACT)
    other.train(50)
    left, right = buffers_of(again.model), buffers_of(other.model)
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    rows = again.rows() == other.rows()
    again.end()
    other.end()
    return {"step": report.step, "stale": report.rows_stale, "differing": differing, "rows": rows}


def resharded(directory, rank, stores, policy, mode, strict, ids):
    """Take over from another number of ranks, look up, train, and recover again."""
    job = ManagedJob(directory / f"store-{rank}", seed=3, policy=policy)
    try:
        report = job.ckpt.recover(from_store=stores, mode=mode, strict=strict)
    except CprError as error:
        return {"error": str(error)}
    rows, found = job.rows(), looked_up(job, ids)
    segments = {n: m._output_segments_tensor.tolist() for n, m in job.modules().items()}
    iterations = {n: int(m._current_iter_tensor) for n, m in job.modules().items()}
    job.history = {key: [row] for key, row in rows.items()}
    job.train(report.step + 14)
    job.end()
    again = ManagedJob(directory / f"store-{rank}", seed=4, policy=policy)
    later = again.ckpt.recover()
    own = again.rows()
    again.end()
    return {
        "error": None, "rows": rows, "found": found, "step": report.step,
        "differences": report.differences, "rows_of_other_ids": report.rows_of_other_ids,
        "segments": segments, "iterations": iterations,
        "foreign": [key for key, row in own.items() if row not in job.history[key]],
        "same_keys": own.keys() == job.keys_at[later.step],
    }  # fmt: skip


def looked_up(job, ids):
    """What TorchRec finds for ids; all ranks look up the same."""
    most = max(map(len, ids.values()))
    values = [number for name in SLOTS for number in (ids[name] * most)[:most]]
    keys = [f"{name}0" for name in SLOTS]
    lengths = torch.ones(len(values), dtype=torch.int64)
    features = KeyedJaggedTensor(keys, torch.tensor(values), lengths=lengths)
    job.model.eval()
    with torch.no_grad():
        found, _ = job.model.module.bags(features)
    job.model.train()
    return {name: found[f"{name}0"][: len(ids[name])].tolist() for name in SLOTS}


KILLED = {
    "default": {"schedule": cpr_ext.EverySteps(3, when_busy="delay")},
    "points": {**EXACT, "schedule": cpr_ext.EverySteps(2, when_busy="wait")},
}


class WritingJob(ManagedJob):
    """Writes the rows of each step down."""

    notes = None

    def note(self, step, rows):
        pickle.dump((step, rows), self.notes)
        self.notes.flush()


def until_killed(directory, rank, life, options):
    job = WritingJob(directory / f"store-{rank}", seed=life, **KILLED[options])
    report = job.ckpt.recover(mode="full" if options == "points" and life else "partial")
    with (directory / f"notes-{rank}").open("ab") as job.notes:
        job.note(report.step, job.rows())
        job.train(10**6)


def recovered(directory, rank, mode, options):
    job = ManagedJob(directory / f"store-{rank}", seed=99, **KILLED[options])
    report = job.ckpt.recover(mode=mode)
    found = {"step": report.step, "others": report.rows_of_other_ids, "stale": report.rows_stale}
    found["rows"] = job.rows()
    job.train(report.step + 4)
    return found
