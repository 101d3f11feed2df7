"""A worker of a job with managed collisions and parity; ``Settings.options``: ``policy``.

Half the ids of a step are new, and each third step gives them slots of others.
"""

import os

from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.integrations.torchrec import sharding_env
from python_tests.integrations.managed_job import SAMPLES, buffers_of, make_batch, sharded
from python_tests.integrations.planned_job import PlannedJob


class ManagedWorkerJob(PlannedJob):
    def build(self, group):
        os.environ["LOCAL_WORLD_SIZE"] = str(group.size())
        policy = self.settings.options["policy"]
        self.model, optimizers = sharded(policy, RowWiseAdagrad, env=sharding_env(group))
        return self.model, optimizers

    def describe(self):
        maps = {name: [checksum(value)] for name, value in buffers_of(self.model).items()}
        return {**super().describe(), **maps}

    def batch(self, step):
        return (make_batch(step, self.rank),), SAMPLES * self.settings.world_size
