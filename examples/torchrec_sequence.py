"""A generative recommender: TorchRec's EmbeddingCollection and a causal sequence model.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # so that torchrun may restart workers
torchrun --nproc-per-node 2 --max-restarts 3 examples/torchrec_sequence.py  # kill -9 a worker

The next item of each user's history is predicted. cpr_ext needs the four numbered statements.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import cpr_ext.integrations.torchrec  # 1

DIM, HEADS, LENGTH, BATCH = 32, 2, 12, 32


class Block(nn.Module):
    """Attention without a softmax, gated, as in HSTU; each position sees those before it."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.project, self.out = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        gate, value, query, key = F.silu(self.project(self.norm(x))).chunk(4, dim=-1)
        value, query, key = (each.unflatten(-1, (HEADS, -1)) for each in (value, query, key))
        scores = F.silu(torch.einsum("blhd,bmhd->bhlm", query, key)) / LENGTH
        seen = torch.einsum("bhlm,bmhd->blhd", scores.tril(), value).flatten(2)
        return x + self.out(self.inner(seen) * gate)


class NextItem(nn.Module):
    """Predicts each item of a history from those before; the others of the batch are negatives."""

    def __init__(self, num_items):
        super().__init__()
        items = EmbeddingConfig(
            name="item", embedding_dim=DIM, num_embeddings=num_items, feature_names=["history"]
        )
        self.items = EmbeddingCollection(tables=[items], device=torch.device("meta"))
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, DIM))
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, histories):
        rows = self.items(histories)["history"].values().view(-1, LENGTH, DIM)
        predicted = self.blocks(rows + self.positions)[:, :-1].flatten(0, 1)
        ids = histories["history"].values().view(-1, LENGTH)[:, 1:].flatten()
        logits = predicted @ rows[:, 1:].flatten(0, 1).T
        is_same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
        return F.cross_entropy(logits.masked_fill(is_same, float("-inf")), torch.arange(len(ids)))


def build(options):
    """The model on all workers, the item table cut by rows, and its optimizers."""
    torch.manual_seed(0)  # every worker begins with the same dense part
    model, sharder = NextItem(options.items), EmbeddingCollectionSharder()
    size = dist.get_world_size()
    apply_optimizer_in_backward(RowWiseAdagrad, model.items.parameters(), {"lr": 0.3})
    cut = construct_module_sharding_plan(
        model.items, {"item": row_wise()}, sharder, size, size, "cpu"
    )
    model = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"items": cut}), sharders=[sharder]
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=3e-3))
    return model, CombinedOptimizer([model.fused_optimizer, adam])


def make_batch(options, step):
    """This worker's histories; they follow from the step's number alone."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    first = torch.randint(0, options.items, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    histories = (first + stride * torch.arange(LENGTH)) % options.items
    return KeyedJaggedTensor(["history"], histories.flatten(), lengths=torch.full((BATCH,), LENGTH))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--store", default="torchrec_sequence_stores")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(options)
    with cpr_ext.integrations.torchrec.make_checkpointer(  # 2
        *(model, optimizer, f"{options.store}/{dist.get_rank()}"),
        # Points at the same steps on all ranks, of which the newest that all have is resumed.
        schedule=cpr_ext.EverySteps(20, when_busy="wait"),
        priority=cpr_ext.AllRows(),
        store=cpr_ext.StoreOptions(retention=cpr_ext.Retention(full_recovery_points=2)),
    ) as ckpt:
        for step in range(ckpt.recover(mode="full").step, options.steps):  # 3
            optimizer.zero_grad()
            loss = model(make_batch(options, step))
            loss.backward()
            optimizer.step()
            ckpt.step(BATCH * dist.get_world_size())  # 4
            if dist.get_rank() == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1:5d}  loss {loss.item():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
