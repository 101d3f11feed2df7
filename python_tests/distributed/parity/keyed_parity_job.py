"""A job with parity whose rows are slots: half the ids of each step are new, and evict others."""

import torch

import cpr_ext
from python_tests.distributed.mlp_job import ROWS, SAMPLES
from python_tests.distributed.parity.parity_job import ParityJob
from python_tests.keyed_job import SlotMap


class KeyedParityJob(ParityJob):
    def build(self, group):
        self.map = SlotMap(ROWS)
        return super().build(group)

    def slot_keys(self):
        scores = {"used": self.map.used}
        return cpr_ext.SlotKeys(self.map.key, scores, on_restored=self.map.rebuild)

    def draw_indices(self, job, generator):
        hot = torch.randint(12, (SAMPLES // 2,), generator=generator)
        fresh = torch.randint(10**12, 2**62, (SAMPLES // 2,), generator=generator)
        slots, new = self.map([*hot.tolist(), *fresh.tolist()])
        weight = job.model.rows.weight
        with job.checkpointer.writing_rows(self.job_tables[0].name, new), torch.no_grad():
            weight[new] = 0.1
            self.optimizers[0].state[weight]["sum"][new] = 0.0
        return slots

    def describe(self):
        """With all that the map goes by, in its order."""
        order = [[*self.map.slots.items()], self.map.free, self.map.clock]
        return {**super().describe(), "map": order}
