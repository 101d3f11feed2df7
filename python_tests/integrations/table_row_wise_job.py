"""A worker of a job whose tables a plan puts on one host each, cut by rows over its workers."""

import os

from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from python_tests.distributed.sharded_job import ShardedJob
from python_tests.integrations.sharded_models import SAMPLES, PooledDlrm, make_batch, sharded

HOSTS = 2


def imported():
    """Returns at once; whoever forks a process for it has this module, and TorchRec."""


class TableRowWiseJob(ShardedJob):
    def build(self, group):
        # As torchrun and `cpr launch` set it on each of so many machines.
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size() // HOSTS)
        return sharded(
            "table_row_wise", "rowwise_adagrad", model=PooledDlrm(), hosts=HOSTS,
            env=sharding_env(group),
            data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
        )  # fmt: skip

    def make_checkpointer(self, model, optimizers, directory):
        return self.watched(make_checkpointer, model, optimizers, directory)

    def train_step(self, job, step):
        inputs, _ = make_batch(step, job.rank)
        job.optimizers.zero_grad()
        job.model(*inputs).backward()
        job.optimizers.step()
        return SAMPLES * job.world_size
