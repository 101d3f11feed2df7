"""TorchRec jobs whose fused optimizers FBGEMM has for GPUs only: run with ``python -O -m``.

FBGEMM refuses such optimizers on a CPU by an assertion, which ``-O`` takes away, and lacks their
operators. A step here changes all that they would: weights, states, counts of steps, whose names
and shapes are FBGEMM's and TorchRec's own.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
from torchrec.optim import optimizers

from python_tests.integrations import sharded_models
from python_tests.integrations.sharded_models import SAMPLES, join, kernels_of, opened, sharded

warnings.filterwarnings("ignore")  # TorchRec's and FBGEMM's own, by the dozen
SAVED, STEPS = 3, 7
BY_ROW = fbgemm.UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
ADAM = {"lr": 0.1, "eps": 1e-3, "beta1": 0.8, "beta2": 0.9}
KINDS = {
    "adam": (optimizers.Adam, ADAM),
    "adam_by_row": (optimizers.Adam, ADAM | {"extra_optimizer_config": BY_ROW}),
    "partial_rowwise_adam": (optimizers.PartialRowWiseAdam, ADAM),
    "lamb": (optimizers.LAMB, ADAM | {"weight_decay": 0.05}),
    "partial_rowwise_lamb": (optimizers.PartialRowWiseLAMB, ADAM),
}


def memory_of(kernel):
    states = [state for of_table in kernel.split_optimizer_states() for state in of_table]
    return [*kernel.split_embedding_weights(), *states]


def run(kind, store, until, seed):
    """Train; what there is then, and the state by name."""
    sharded_models.FUSED[kind] = KINDS[kind][0]
    sharded_models.settings_of = lambda fused: dict(KINDS[kind][1])  # TorchRec adds to it
    parallel, optimizer = sharded("mixed", kind, seed=seed)
    kernels = kernels_of(parallel)
    with opened(parallel, optimizer, store) as ckpt:
        report = ckpt.recover()

        def step():
            draw = torch.Generator().manual_seed(ckpt.step_count)
            for kernel in kernels:
                kernel.iter += 1
                kernel.iter_cpu += 1
                for part in memory_of(kernel):
                    part.mul_(0.5).add_(torch.rand(part.shape, generator=draw))
            ckpt.step(SAMPLES)

        while ckpt.step_count < until:
            step()
        if until == SAVED:
            ckpt.save("partial").wait_until_done()
            step()
        arrays = ckpt.tables[0].arrays()
        return {
            "rows": [part.clone() for kernel in kernels for part in memory_of(kernel)],
            "steps": [(int(kernel.iter), int(kernel.iter_cpu)) for kernel in kernels],
            "report": (report.step, report.rows_stale),
            "shapes": {name: tuple(array.shape) for name, array in arrays.items()},
        }


def main(directory):
    join(f"{directory}/group")
    found = {}
    for kind in KINDS:
        run(kind, f"{directory}/{kind}", SAVED, 0)
        resumed = run(kind, f"{directory}/{kind}", STEPS, 1)
        found[kind] = resumed, run(kind, f"{directory}/whole-{kind}", STEPS, 0)
    torch.save(found, f"{directory}/found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
