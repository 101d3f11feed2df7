"""A job of fates with tables of TorchRec, cut by rows; the fates of a worker are in its part."""

import os

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from python_tests.distributed.hosts.fate_job import BATCH, DIM, ROWS, FateJob, Head

FATE_DIM = 4  # the least that FBGEMM takes


def imported():
    """Returns at once; whoever forks a process for it has this module, and TorchRec."""


class Net(nn.Module):
    def __init__(self, num_fates):
        super().__init__()
        shapes = {"rows": (ROWS, DIM), "fates": (num_fates, FATE_DIM)}
        inits = {"rows": nn.init.normal_, "fates": nn.init.zeros_}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name],
                    init_fn=inits[name],
                )
                for name, (rows, dim) in shapes.items()
            ],
            device=torch.device("meta"),
        )  # fmt: skip
        self.head = Head(stateful=True)

    def forward(self, ids, num_fates):
        pooled = self.bags(ids)
        loss = nn.functional.softplus(self.head(pooled["rows"])).mean()
        return loss - num_fates * pooled["fates"].sum()


class TorchRecJob(FateJob):
    checkpointer = staticmethod(make_checkpointer)

    def build(self, group):
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        torch.manual_seed(5)
        net, size = Net(group.size() * self.settings.num_steps), group.size()
        tables = net.bags.embedding_bags
        apply_optimizer_in_backward(RowWiseAdagrad, tables["rows"].parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(torch.optim.SGD, tables["fates"].parameters(), {"lr": 1.0})
        sharder = EmbeddingBagCollectionSharder()
        cut = construct_module_sharding_plan(
            net.bags, {name: row_wise() for name in tables}, sharder, 1, size, "cpu"
        )
        self.model = DistributedModelParallel(
            net, env=sharding_env(group), device=torch.device("cpu"),
            plan=ShardingPlan({"bags": cut}), sharders=[sharder],
        )  # fmt: skip
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
        self.optimizers = [CombinedOptimizer([self.model.fused_optimizer, adam])]
        return self.model, self.optimizers

    def loss(self, job, step):
        rows = self.ids(step)
        fate = torch.full((1,), self.rank * self.settings.num_steps + step)
        lengths = torch.zeros(2, BATCH, dtype=torch.int64)
        lengths[0], lengths[1, 0] = rows.shape[1], 1
        ids = KeyedJaggedTensor(
            ["rows", "fates"], torch.cat([rows.flatten(), fate]), lengths=lengths.flatten()
        )
        # TorchRec divides gradients of rows by the number of workers.
        return job.model(ids, job.world_size)

    def final_state(self, job):
        state = own(super().final_state(job))
        fates = state["model"].pop("bags.embedding_bags.fates.weight")
        state["model"]["fates.weight"] = fates[:, 0].clone()
        return state


def own(state):
    """With the rows of this worker in place of tensors over all."""
    if isinstance(state, ShardedTensor):
        return state.local_tensor().clone()
    if isinstance(state, dict):
        return {key: own(value) for key, value in state.items()}
    return [own(value) for value in state] if isinstance(state, list) else state
