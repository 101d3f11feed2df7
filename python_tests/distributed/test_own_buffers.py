"""Buffers of each worker's own: batch norm, spectral norm, and one that no ``state_dict()`` has."""

import pytest
import torch

from python_tests.distributed.hosts.fate_job import MODES
from python_tests.distributed.hosts.oracle import differences

JOB = ("python_tests.distributed.hosts.fate_job", "FateJob")


def finals(make_cluster, name, mode, *, kill=None):
    """How a job of two workers ends; ``kill``: this one once its store has points to return to."""
    options = {"mode": mode, "model": "stateful", "hands": []}
    settings = {"recovery": MODES[mode][0], "step_seconds": 0.02 if kill is not None else 0.0}
    cluster = make_cluster(name, job=JOB, world_size=2, num_steps=45, options=options, **settings)
    cluster.start()
    if kill is not None:
        cluster.wait_for_step(25)
        cluster.kill(kill)
        cluster.wait_for_death(kill)
        cluster.start(kill)
    cluster.finish()
    recoveries = [event["recovery"] for event in cluster.recoveries(0)]
    folder = cluster.settings.directory
    ends = [torch.load(f"{folder}/final-{rank}.pt", weights_only=False) for rank in cluster.ranks]
    return ends, recoveries


@pytest.mark.parametrize("mode", ["full", "exact"])
def test_a_job_ends_in_the_bits_of_one_that_lost_nobody(make_cluster, mode):
    undisturbed, _ = finals(make_cluster, "undisturbed", mode)
    own = [each["buffers"]["head.module.layers.1.running_mean"] for each in undisturbed]
    assert not torch.equal(*own)
    assert undisturbed[0]["buffers"]["head.module.calls"] == 45
    for rank in range(2):
        ends, recoveries = finals(make_cluster, f"killed {rank}", mode, kill=rank)
        assert [each["recovery"] for each in recoveries[1:]] == [mode]
        assert recoveries[1]["step"] >= 10
        for known, found in zip(undisturbed, ends, strict=True):
            assert list(differences(known, found)) == []
