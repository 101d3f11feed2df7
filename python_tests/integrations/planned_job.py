"""Workers of TorchRec jobs: tables that are cut by a plan, or mapped by managed collisions.

``Settings.options`` of the first: ``plan``, over ``hosts``. One small table is on every worker:
TorchRec replicates it in a data-parallel module of its own. Of the second: ``policy``. Half the ids
of a step are new, and each third step gives them slots of others.
"""

import os

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from python_tests.distributed.job import Job, die
from python_tests.integrations import managed_job, sharded_models

REPLICATED = "d"


def imported():
    """Returns at once; whoever forks a process for it has this module, and TorchRec."""


class PlannedJob(Job):
    def build(self, group):
        plan, hosts = self.options["plan"], self.options.get("hosts", 1)
        # As torchrun and `cpr launch` set it on each of so many machines.
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size() // hosts)
        self.model, optimizers = sharded_models.sharded(
            plan, "rowwise_adagrad", hosts=hosts,
            env=sharding_env(group), replicated=(REPLICATED,),
        )  # fmt: skip
        return self.model, optimizers

    def final_state(self, job):
        return sharded_models.dense_of(job.model)

    def describe(self):
        dense = sharded_models.dense_of(self.model)
        return {name: [checksum(value)] for name, value in dense.items()}

    def make_checkpointer(self, model, optimizers, directory):
        return self.watched(make_checkpointer, model, optimizers, directory)

    def train_step(self, job, step):
        self.between_steps(job, step)
        job.optimizers.zero_grad()
        linear = next(m for m in job.model.modules() if isinstance(m, torch.nn.Linear))
        if self.death in (["forward", step], ["backward", step]):
            linear.register_forward_hook(self.die_behind_lookups)
        job.model(*self.batch(step)).backward()
        self.die_if("reduced", step)
        job.optimizers.step()
        return self.settings.batch_size

    def die_behind_lookups(self, linear, given, values):
        if self.death[0] == "forward":
            die()
        values.register_hook(lambda gradient: die())  # before the rows' gradients are sent

    def batch(self, step):
        return sharded_models.make_batch(step, self.rank)[0]


class ManagedWorkerJob(PlannedJob):
    def build(self, group):
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size())
        self.model, optimizers = managed_job.sharded(
            self.options["policy"], RowWiseAdagrad, env=sharding_env(group)
        )
        return self.model, optimizers

    def describe(self):
        maps = managed_job.buffers_of(self.model)
        return {**super().describe(), **{name: [checksum(v)] for name, v in maps.items()}}

    def batch(self, step):
        return (managed_job.make_batch(step, self.rank),)
