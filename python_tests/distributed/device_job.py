"""The job that tests of live recovery hurt, its tables on the emulated CUDA device."""

import importlib

import cpr_ext
from python_tests.distributed.parity.parity_job import ParityJob
from python_tests.distributed.sharded_job import ShardedJob
from python_tests.emulated_gpu import emulate


class DeviceJob(ShardedJob):
    """Each worker is a forked process, and has a device of its own."""

    def __init__(self, settings, rank, life):
        emulate()
        self.emulator = importlib.import_module("cpr_ext._emulated").emulator
        super().__init__(settings, rank, life)

    def train_step(self, job, step):
        num_samples = super().train_step(job, step)
        trackers = job.checkpointer._trackers.values()
        assert all(type(tracker).__name__.startswith("Device") for tracker in trackers)
        launched = self.emulator.calls().get("cudaLaunchKernelEx", 0)
        self.journal.write("kernels", step=step, launched=launched)
        return num_samples


class DeviceParityJob(ParityJob):
    def __init__(self, settings, rank, life):
        emulate()
        super().__init__(settings, rank, life)


assert cpr_ext.Checkpointer  # imported before the fork, with the core for CPUs
