"""A worker that trains an MLP in each variant of DistributedDataParallel, beside rows of its own.

``Settings.options``: ``layers`` of the MLPs, ``variants`` by name, and what goes wrong, see below.
"""

import itertools
import os
import signal

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cpr_ext
from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.storage.retention import Retention
from python_tests.distributed.sharded_job import KINDS, ShardedJob, digest

ROWS, DIM, SAMPLES = 40, 8, 16
SEVERAL_BUCKETS = (DIM, 700, 700, 700, 1)
# Every snapshot holds all rows as they were after one step.
WHOLE_STEPS = {
    "priority": cpr_ext.AllRows(),
    "store": cpr_ext.StoreOptions(retention=Retention(full_recovery_points=3)),
}  # fmt: skip


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Mlp(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*shape) for shape in itertools.pairwise(layers)
        )
        self.unused = torch.nn.Linear(3, 3)
        self.norm = None
        self.uses_all = True
        self.at = None  # called between the first layer and the others

    def forward(self, values):
        for number, layer in enumerate(self.layers):
            values = layer(values)
            if number == 0 and self.norm is not None:
                values = self.norm(values) * (1.0 + 0.01 * self.seen)
                self.seen += 1.0
            if number == 0 and self.at is not None:
                self.at(values)
            if number + 1 < len(self.layers):
                values = values.relu()
        if self.uses_all:
            values = values + 0.0 * self.unused.weight.sum() + 0.0 * self.unused.bias.sum()
        return values


def plain(mlp):
    return DistributedDataParallel(mlp)


def static_graph(mlp):
    return DistributedDataParallel(mlp, static_graph=True)


def views(mlp):
    return DistributedDataParallel(mlp, gradient_as_bucket_view=True)


def unused(mlp):
    mlp.uses_all = False
    return DistributedDataParallel(mlp, find_unused_parameters=True)


def hook(mlp):
    ddp = DistributedDataParallel(mlp)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def builtin_hook(mlp):
    ddp = DistributedDataParallel(mlp)
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    return ddp


def compiled(mlp):
    return torch.compile(DistributedDataParallel(mlp), backend="eager")


def normed(mlp):
    """Buffers of each worker's own: batch norm's, and a counter that no snapshot has."""
    mlp.norm = torch.nn.BatchNorm1d(mlp.layers[0].out_features)
    mlp.register_buffer("seen", torch.zeros(1), persistent=False)
    return DistributedDataParallel(mlp, broadcast_buffers=False)


VARIANTS = {
    made.__name__: made
    for made in (plain, static_graph, views, unused, hook, builtin_hook, compiled, normed)
} | {"accumulating": plain}


def frozen(mlp):
    mlp.layers[0].requires_grad_(False)
    return DistributedDataParallel(mlp)


# What one worker makes in place of what the others make.
LAYOUTS = {"layout": static_graph, "unused": unused, "frozen": frozen}


class MlpJob(ShardedJob):
    def build(self, group):
        torch.manual_seed(3)
        model = torch.nn.Module()
        model.rows = torch.nn.Embedding(ROWS, DIM, sparse=True)
        for name in self.settings.options["variants"]:
            make = LAYOUTS.get(self.spoiled_by(), VARIANTS[name])
            setattr(model, name, make(Mlp(self.settings.options["layers"])))
        self.model = model
        rows = list(model.rows.parameters())
        dense = [p for name, p in model.named_parameters() if not name.startswith("rows")]
        return model, [torch.optim.Adagrad(rows, lr=0.1), torch.optim.Adam(dense, lr=0.01)]

    def train_step(self, job, step):
        if self.settings.options.get("waits"):
            job.checkpointer.wait()
        where = self.suicide[0] if self.suicide and self.suicide[1] == step else None
        if where == "saving":  # a snapshot is of a whole step, so it is taken between two
            job.checkpointer.save("base")
            die()
        if where == "committing":
            die_at_the_next_rename()
            job.checkpointer.save("base")
            job.checkpointer.wait()
        generator = torch.Generator().manual_seed(1000 * step + job.rank)
        indices = self.draw_indices(job, generator)
        labels = torch.randn(SAMPLES, 1, generator=generator)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        for name in self.settings.options["variants"]:
            self.backward(name, job.model, indices, labels, where)
        if where == "reduced":
            die()
        job.optimizers[0].step()
        if where == "optimizer":
            die()
        job.optimizers[1].step()
        self.spoil(job, step)
        if self.settings.whole_steps:  # before a snapshot may have it
            self.journal.write("trained", step=step + 1, tables=digest(self.job_tables))
        return SAMPLES * job.world_size

    def backward(self, name, model, indices, labels, where):
        ddp = getattr(model, name)
        mlp = next(module for module in ddp.modules() if isinstance(module, Mlp))
        if where == "forward":
            mlp.at = lambda values: die()
        if where == "backward":  # the last layers' gradients are on their way then
            mlp.at = lambda values: values.register_hook(lambda gradient: die())
        if name == "accumulating":
            with ddp.no_sync():
                loss_of(ddp(self.inputs_of(model, indices)), labels).backward()
        loss_of(ddp(self.inputs_of(model, indices)), labels).backward()

    def inputs_of(self, model, indices):
        return model.rows(indices)

    def draw_indices(self, job, generator):
        return torch.randint(ROWS, (SAMPLES,), generator=generator)

    def slot_keys(self):
        return None

    def make_checkpointer(self, model, optimizers, directory):
        begin = ROWS * self.rank - (2 if self.spoiled_by() == "plan" else 0)
        rows = ROWS * self.settings.world_size
        part = TablePart("rows", (begin, begin + ROWS), (0, DIM), rows, DIM)
        table = Table(
            part.name, model.rows.weight, optimizers[0], [model.rows], part=part,
            keys=self.slot_keys(),
        )  # fmt: skip
        kind = KINDS.get(self.suicide[0], cpr_ext.Checkpointer) if self.suicide else None
        self.job_tables = [table]
        when_busy = "wait" if self.settings.whole_steps else "delay"
        return (kind or cpr_ext.Checkpointer)(
            model, optimizers, directory, tables=[table],
            schedule=cpr_ext.EverySteps(self.settings.every_steps, when_busy=when_busy),
            **(WHOLE_STEPS if self.settings.whole_steps else {}),
            **self.watched_options(),
        )  # fmt: skip

    def watched_options(self):
        return {}

    def spoiled_by(self):
        what, rank, *_ = self.settings.options.get("spoil") or (None, None)
        return what if rank == self.rank else None

    def spoil(self, job, step):
        """One worker goes another way behind this step: ``{"spoil": [what, rank, step]}``."""
        what, rank, at = self.settings.options.get("spoil", (None, None, None))
        if (rank, at) != (job.rank, step):
            return
        with torch.no_grad():
            if what == "bit":
                weight = job.model.plain.module.layers[0].weight
                weight.view(torch.int32)[2, 1] ^= 1
            if what == "state":
                state = job.optimizers[1].state[job.model.plain.module.layers[0].bias]
                state["exp_avg"][1] += 1.0
            if what == "learning rate":
                job.optimizers[1].param_groups[0]["lr"] = 0.011
            if what == "step":
                job.checkpointer.step(SAMPLES)

    def describe(self):
        return {
            name: [checksum(value) for value in replica.parameters()]
            for name, replica in self.model.named_children()
            if name != "rows"
        }

    def worker_options(self):
        return {"check_every_steps": self.settings.options.get("check_every_steps")}


def loss_of(values, labels):
    return ((values - labels) ** 2).mean()


def die_at_the_next_rename():
    """In a commit, a moment before its manifest is replaced."""
    import pathlib

    pathlib.Path.replace = lambda *arguments: die()


class ReplicatedTableJob(MlpJob):
    """Its table is replicated, too: the gradients of all workers change its rows."""

    def build(self, group):
        model, _ = super().build(group)
        model.shared = DistributedDataParallel(torch.nn.EmbeddingBag(ROWS, DIM))
        return model, [
            torch.optim.Adagrad(model.rows.parameters(), lr=0.1),
            torch.optim.Adam(
                [p for name, p in model.named_parameters() if not name.startswith("rows")], lr=0.01
            ),
        ]

    def backward(self, name, model, indices, labels, where):
        super().backward(name, model, indices, labels, where)
        model.shared(indices.unsqueeze(1)).square().mean().backward()

    def make_checkpointer(self, model, optimizers, directory):
        return cpr_ext.Checkpointer(model, optimizers, directory)


class LeftToTheWorkerJob(ReplicatedTableJob):
    make_checkpointer = None


class DrawingJob(MlpJob):
    """Each worker draws numbers of its own, and a schedule of the learning rate is extra state."""

    def __init__(self, settings, rank, life):
        super().__init__(settings, rank, life)
        torch.manual_seed(rank)
        self.trained = None  # the step that this process trained last, since it built the model

    def build(self, group):
        with torch.random.fork_rng():
            model, optimizers = super().build(group)
        self.trained = None
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda n: 1 / (1 + n))
        return model, optimizers

    def watched_options(self):
        return {"state": {"scheduler": lambda: self.scheduler.state_dict()}}

    def train_step(self, job, step):
        if step > 0 and self.trained != step - 1:
            self.scheduler.load_state_dict(job.state["scheduler"])
        num_samples = super().train_step(job, step)
        self.scheduler.step()
        self.trained = step
        return num_samples

    def inputs_of(self, model, indices):
        return model.rows(indices) * torch.rand(SAMPLES, DIM)
