"""A TorchRec job whose fused optimizer FBGEMM has for GPUs only: run with ``python -O -m``.

FBGEMM refuses such optimizers on a CPU by an assertion, which ``-O`` takes away, and lacks their
operators. Those here stand for them: the state, its names and shapes, the count of steps and all
else are FBGEMM's and TorchRec's own.
"""

import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist
from fbgemm_gpu import split_table_batched_embeddings_ops_training as fbgemm
from torchrec.optim import optimizers

import cpr_ext
from cpr_ext.integrations.torchrec import make_checkpointer
from python_tests.integrations import sharded_models
from python_tests.integrations.sharded_models import copy_parts, join, sharded, train, whole_tables

warnings.filterwarnings("ignore")  # TorchRec's and FBGEMM's own, by the dozen
BAGS = 0
SAVED, STEPS = 3, 7
BY_ROW = fbgemm.UserEnabledConfigDefinition(use_rowwise_bias_correction=True)
ADAM = {"lr": 0.1, "eps": 1e-3, "beta1": 0.8, "beta2": 0.9}
KINDS = {
    "adam": (optimizers.Adam, ADAM),
    "adam_decayed": (optimizers.Adam, ADAM | {"weight_decay": 0.05}),
    "adam_by_row": (optimizers.Adam, ADAM | {"extra_optimizer_config": BY_ROW}),
    "partial_rowwise_adam": (optimizers.PartialRowWiseAdam, ADAM),
    "lamb": (optimizers.LAMB, ADAM | {"weight_decay": 0.05}),
    "partial_rowwise_lamb": (optimizers.PartialRowWiseLAMB, ADAM),
}
OPTIONS = {"priority": cpr_ext.AllRows(), "schedule": cpr_ext.EverySteps(10**6)}


class Lookup(torch.autograd.Function):
    """What FBGEMM's operators do: look rows up, and update them as their gradient arrives."""

    @staticmethod
    def forward(context, host_weights, args, update):
        batch = (len(args.offsets) - 1) // (len(args.D_offsets) - 1)
        starts, widths = args.weights_offsets.tolist(), args.D_offsets.diff().tolist()
        bounds = args.offsets.tolist()
        features, outputs = [], []
        for number, (start, dim) in enumerate(zip(starts, widths, strict=True)):
            offsets = args.offsets[number * batch : (number + 1) * batch + 1]
            rows = args.indices[bounds[number * batch] : bounds[(number + 1) * batch]].long()
            sample = torch.repeat_interleave(torch.arange(batch), offsets.diff())
            found = torch.stack([row_of(host_weights, start, row, dim) for row in rows.tolist()])
            features.append((number, rows, sample, start, dim))
            is_pooled = args.pooling_mode == BAGS
            outputs.append(pooled(found, sample, batch) if is_pooled else found)
        context.features, context.is_pooled = features, args.pooling_mode == BAGS
        context.weights, context.update = host_weights.detach(), update
        return torch.cat(outputs, 1 if context.is_pooled else 0)

    @staticmethod
    def backward(context, gradient):
        sizes = [f[4] if context.is_pooled else len(f[1]) for f in context.features]
        parts = gradient.split(sizes, 1 if context.is_pooled else 0)
        tables = {}
        for (number, rows, sample, start, dim), part in zip(context.features, parts, strict=True):
            by_row = part[sample] if context.is_pooled else part
            tables.setdefault((start, dim), []).append((number, rows, by_row))
        for (start, dim), found in tables.items():
            rows, where = torch.cat([each[1] for each in found]).unique(return_inverse=True)
            summed = torch.zeros(len(rows), dim).index_add_(
                0, where, torch.cat([each[2] for each in found])
            )
            for row, row_gradient in zip(rows.tolist(), summed, strict=True):
                weight = row_of(context.weights, start, row, dim)
                context.update(found[0][0], row, weight, row_gradient)
        return None, None, None


def row_of(memory, start, row, dim):
    return memory.detach()[start + row * dim : start + (row + 1) * dim]


def pooled(rows, sample, batch):
    return torch.zeros(batch, rows.size(1)).index_add_(0, sample, rows)


def operator(*, is_by_row, is_lamb):
    """Make the operator of Adam or LAMB; ``is_by_row``: its second moment is one value per row."""

    def invoke(args, settings, momentum1, momentum2, step, row_counter=None, **others):
        def update(feature, row, weight, gradient):
            dim = len(weight)
            first = row_of(momentum1.host, int(momentum1.offsets[feature]), row, dim)
            width = 1 if is_by_row else dim
            second = row_of(momentum2.host, int(momentum2.offsets[feature]), row, width)
            square = gradient.square().mean() if is_by_row else gradient.square()
            first.lerp_(gradient, 1 - settings.beta1)
            second.lerp_(square.expand(width), 1 - settings.beta2)
            count = step
            if row_counter is not None:
                counted = row_of(row_counter.host, int(row_counter.offsets[feature]), row, 1)
                count = float(counted.add_(1))
            mean = first / (1 - settings.beta1**count)
            scale = (second / (1 - settings.beta2**count)).sqrt() + settings.eps
            change = mean / scale + settings.weight_decay * weight
            if is_lamb:
                change *= weight.norm() / change.norm().clamp(min=1e-12)
            weight.sub_(args.learning_rate_tensor * change)

        return Lookup.apply(args.host_weights, args, update)

    return invoke


def start(kind, seed):
    sharded_models.FUSED[kind] = KINDS[kind][0]
    sharded_models.settings_of = lambda fused: dict(KINDS[kind][1])  # TorchRec adds to it
    return sharded("mixed", kind, seed=seed)


def begin(kind, store, seed):
    parallel, optimizer = start(kind, seed)
    ckpt = make_checkpointer(parallel, optimizer, store, **OPTIONS)
    report = ckpt.recover()
    if report.step == 0:  # the same rows whatever the seed
        with torch.no_grad():
            for parameter in parallel.module.linear.parameters():
                parameter.fill_(0.1)
            for table in ckpt.tables:
                count = table.weight.numel()
                table.weight.copy_(torch.linspace(-1, 1, count).view_as(table.weight))
    return parallel, optimizer, ckpt, report


def end(kind, store, seed):
    """Train to the end; what there is then."""
    parallel, optimizer, ckpt, report = begin(kind, store, seed)
    with ckpt:
        train(parallel, optimizer, ckpt, STEPS - report.step)
        arrays = ckpt.tables[0].arrays()
        return {
            "tables": whole_tables(copy_parts(ckpt.tables)),
            "dense": [p.detach().clone() for p in parallel.module.linear.parameters()],
            "report": (report.step, report.rows_stale),
            "shapes": {name: tuple(array.shape) for name, array in arrays.items()},
        }


def main(directory, ends):
    """Train a job of each kind; ``ends``: all are "killed" after three steps, or "resumed"."""
    for name in ("adam", "lamb", "partial_rowwise_adam", "partial_rowwise_lamb"):
        module = getattr(fbgemm.invokers, f"lookup_{name}")
        module.invoke = operator(is_by_row="rowwise" in name, is_lamb="lamb" in name)
    join(f"{directory}/group-{ends}")
    if ends == "resumed":
        found = {
            kind: (end(kind, f"{directory}/{kind}", 1), end(kind, f"{directory}/whole-{kind}", 2))
            for kind in KINDS
        }
        torch.save(found, f"{directory}/found.pt")
        dist.destroy_process_group()
        return
    alive = []
    for kind in KINDS:
        parallel, optimizer, ckpt, _ = begin(kind, f"{directory}/{kind}", 0)
        alive.append(ckpt)
        train(parallel, optimizer, ckpt, SAVED)
        ckpt.save("partial").wait_until_done()
        train(parallel, optimizer, ckpt, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
