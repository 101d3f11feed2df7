"""A worker of a job whose tables are cut by a plan: that of ``Settings.options``, over ``hosts``.

One small table is on every worker: TorchRec replicates it in a data-parallel module of its own.
"""

import os

import torch

from cpr_ext.distributed import Parity
from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.integrations.torchrec import make_checkpointer, sharding_env
from python_tests.distributed.mlp_job import die, die_at_the_next_rename
from python_tests.distributed.sharded_job import ShardedJob
from python_tests.integrations.sharded_models import SAMPLES, make_batch, sharded

REPLICATED = "d"


def imported():
    """Returns at once; whoever forks a process for it has this module, and TorchRec."""


class PlannedJob(ShardedJob):
    def build(self, group):
        plan, hosts = self.settings.options["plan"], self.settings.options.get("hosts", 1)
        # As torchrun and `cpr launch` set it on each of so many machines.
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size() // hosts)
        self.model, optimizers = sharded(
            plan, "rowwise_adagrad", hosts=hosts,
            env=sharding_env(group), replicated=(REPLICATED,),
        )  # fmt: skip
        return self.model, optimizers

    def final_state(self, model):
        kinds = (torch.Tensor, torch.nn.Parameter)
        return {n: value for n, value in model.state_dict().items() if type(value) in kinds}

    def describe(self):
        return {name: [checksum(value)] for name, value in self.final_state(self.model).items()}

    def make_checkpointer(self, model, optimizers, directory):
        return self.watched(make_checkpointer, model, optimizers, directory)

    def worker_options(self):
        options = self.settings.options
        if "group_size" not in options:
            return {}
        rate = options.get("rebuild_rate")
        return {"parity": Parity(options["group_size"], rebuild_bytes_per_second=rate)}

    def observe(self, event):
        own = getattr(self.worker._parity, "_own", None)
        self.settings.digests = own is None or not own.missing.is_any  # of all rows, or none
        super().observe(event)

    def train_step(self, job, step):
        where = self.suicide[0] if self.suicide and self.suicide[1] == step else None
        if where == "committing":
            die_at_the_next_rename()
            job.checkpointer.save("base")
            job.checkpointer.wait()
        inputs, num_samples = self.batch(step)
        job.optimizers.zero_grad()
        if where in ("forward", "backward"):
            linear = next(m for m in job.model.modules() if isinstance(m, torch.nn.Linear))
            linear.register_forward_hook(lambda *arguments: self.die_at(where, arguments[2]))
        job.model(*inputs).backward()
        if where == "reduced":
            die()
        job.optimizers.step()
        return num_samples

    def batch(self, step):
        return make_batch(step, self.rank)[0], SAMPLES * self.settings.world_size

    def die_at(self, where, values):
        """In forward behind the lookups, or in backward before the rows' gradients are sent."""
        if where == "forward":
            die()
        values.register_hook(lambda gradient: die())
