"""A worker of a job whose tables a plan puts on one host each, cut by rows over its workers.

One small table is on every worker: TorchRec replicates it in a data-parallel module of its own.
"""

import os

import torch

from cpr_ext.distributed.comparison import checksum
from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from python_tests.distributed.sharded_job import ShardedJob
from python_tests.integrations.sharded_models import SAMPLES, PooledDlrm, make_batch, sharded

HOSTS, REPLICATED = 2, "d"


def imported():
    """Returns at once; whoever forks a process for it has this module, and TorchRec."""


class TableRowWiseJob(ShardedJob):
    def build(self, group):
        # As torchrun and `cpr launch` set it on each of so many machines.
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size() // HOSTS)
        self.model, optimizers = sharded(
            "table_row_wise", "rowwise_adagrad", model=PooledDlrm(), hosts=HOSTS,
            env=sharding_env(group), replicated=(REPLICATED,),
        )  # fmt: skip
        return self.model, optimizers

    def describe(self):
        return {
            name: [checksum(value)]
            for name, value in self.model.state_dict().items()
            if type(value) in (torch.Tensor, torch.nn.Parameter)
        }

    def make_checkpointer(self, model, optimizers, directory):
        return self.watched(make_checkpointer, model, optimizers, directory)

    def train_step(self, job, step):
        inputs, _ = make_batch(step, job.rank)
        job.optimizers.zero_grad()
        job.model(*inputs).backward()
        job.optimizers.step()
        return SAMPLES * job.world_size
