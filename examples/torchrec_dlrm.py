"""A DLRM of TorchRec whose workers outlive each other.

cpr launch --nproc 4 examples/torchrec_dlrm.py           # kill -9 any worker, at any time
cpr launch --nproc 4 examples/torchrec_dlrm.py --parity  # the same, and no sample is lost
torchrun --nproc-per-node 4 examples/torchrec_dlrm.py    # the usual way: all restart together
"""

import argparse
import os

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr_ext import EverySteps
from cpr_ext.distributed import Parity, Worker, worker_directory
from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env

TABLES = [f"table_{number}" for number in range(8)]
DENSE, DIM, BATCH = 13, 16, 256
DENSE_LAYERS, OVER_LAYERS = [64, DIM], [64, 1]


def build(group):
    """The model on all workers of the group, tables cut by rows, and its optimizers."""
    torch.manual_seed(0)  # every worker begins with the same dense part
    configs = [
        EmbeddingBagConfig(
            name=name, embedding_dim=DIM, num_embeddings=options.rows, feature_names=[name]
        )
        for name in TABLES
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.05})
    dlrm = DLRMTrain(DLRM(bags, DENSE, DENSE_LAYERS, OVER_LAYERS, torch.device("cpu")))
    sharder, world_size = EmbeddingBagCollectionSharder(), group.size()
    cut = construct_module_sharding_plan(
        bags, dict.fromkeys(TABLES, row_wise()), sharder, world_size, world_size, "cpu"
    )
    model = DistributedModelParallel(
        dlrm,
        env=sharding_env(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": cut}),
        sharders=[sharder],
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    return model, CombinedOptimizer([model.fused_optimizer, adam])


def make_batch(step, rank):
    """This worker's share of a step's samples; it follows from the step's number alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    draws = torch.rand(len(TABLES), BATCH, generator=generator) ** 4  # a few rows are hot
    rows = (draws * options.rows).long()
    lengths = torch.ones(len(TABLES) * BATCH, dtype=torch.int64)
    sparse = KeyedJaggedTensor(TABLES, rows.flatten(), lengths=lengths)
    labels = ((rows % 7 - 3).sum(0) > 0).float()  # what there is to learn: a weight of each row
    return Batch(torch.randn(BATCH, DENSE, generator=generator), sparse, labels)


def train_step(model, optimizer, step, group):
    optimizer.zero_grad()
    loss, _ = model(make_batch(step, group.rank()))
    loss.backward()
    optimizer.step()
    if group.rank() == 0 and step % 50 == 0:
        print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return BATCH * group.size()


def checkpointer_of(model, optimizer, directory):
    return make_checkpointer(model, optimizer, directory, schedule=EverySteps(options.save_every))


def run_live():
    """Under ``cpr launch``: who is lost is replaced, the others go on in their processes."""

    def observe(event):
        last = worker.recoveries[-1] if event.kind == "recovered" else None
        if last and len(worker.recoveries) > 1 and last.source == worker.identity.rank:
            print(f"after step {last.step}: {sum(last.samples_lost)} samples lost", flush=True)

    kind = {}
    if options.parity:
        world_size = int(os.environ["CPR_WORLD_SIZE"])
        group_size = next(size for size in (4, 3, 2, world_size) if world_size % size == 0)
        kind = {"recovery": "exact", "parity": Parity(group_size=group_size)}
    worker = Worker.from_environment(options.store, observe=observe, **kind)
    worker.run(
        build,
        lambda job, step: train_step(job.model, job.optimizers, step, job.group),
        num_steps=options.steps,
        make_checkpointer=checkpointer_of,
    )


def run_together():
    """Under ``torchrun``: when one is lost all begin anew, each from its own store."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    model, optimizer = build(group)
    directory = worker_directory(options.store, rank, group.size())
    with checkpointer_of(model, optimizer, directory) as ckpt:
        ckpt.recover()  # all go on from the same step
        while ckpt.step_count < options.steps:
            ckpt.step(train_step(model, optimizer, ckpt.step_count, group))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--store", default="torchrec_stores")
    parser.add_argument("--parity", action="store_true", help="peers hold XOR parity of all rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_live() if "CPR_WORLD_SIZE" in os.environ else run_together()
