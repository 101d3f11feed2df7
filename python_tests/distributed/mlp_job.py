"""A worker that trains MLPs in DistributedDataParallel beside rows of its own; all by options.

``layers`` of the MLPs and ``variants`` by name; ``draws``: each worker draws numbers of its own,
and a schedule of the learning rate is extra state; ``keyed``: rows are slots, half the ids of each
step are new and evict others; ``total``: so many rows of one table, cut into a part per worker;
``shared``: a replicated table too; ``optimizer`` of the rows; ``device``: rows are on an emulated
GPU; ``spoil``: [what, rank, step]; ``faults``: rank -> a point of FAULTS, which kills
nobody. Moments of death: those of a Job, "forward", "backward", "optimizer", and those of POINTS.
"""

import itertools
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cpr_ext
from cpr_ext.distributed import worker
from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.distributed.parity import encoding, exchange, group_codec, member, own_rows, sender
from cpr_ext.state.table import Table
from cpr_ext.state.table_part import TablePart
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.distributed.job import Job, die, emulated
from python_tests.distributed.journal import journal_of
from python_tests.keyed_job import SlotMap

ROWS, DIM, SAMPLES = 40, 8, 16
SEVERAL_BUCKETS = (DIM, 700, 700, 700, 1)
METRICS = ("protected", "lag_steps", "bytes_sent", "rebuild_progress", "rebuilds")
OPTIMIZERS = {
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.1),
    "rowwise": lambda rows: RowWiseAdagrad(rows, lr=0.1),
    "sparse adam": lambda rows: torch.optim.SparseAdam(rows, lr=0.01),
}


class Mlp(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*shape) for shape in itertools.pairwise(layers)
        )
        self.unused = torch.nn.Linear(3, 3)
        self.norm, self.uses_all = None, True
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


def unused(mlp):
    mlp.uses_all = False
    return DistributedDataParallel(mlp, find_unused_parameters=True)


def hooked(mlp, register, *hook):
    getattr(ddp := DistributedDataParallel(mlp), register)(*hook)
    return ddp


def normed(mlp):
    """Buffers of each worker's own: batch norm's, and a counter that no snapshot has."""
    mlp.norm = torch.nn.BatchNorm1d(mlp.layers[0].out_features)
    mlp.register_buffer("seen", torch.zeros(1), persistent=False)
    return DistributedDataParallel(mlp, broadcast_buffers=False)


VARIANTS = {
    "plain": DistributedDataParallel, "accumulating": DistributedDataParallel,
    "static graph": lambda mlp: DistributedDataParallel(mlp, static_graph=True),
    "views": lambda mlp: DistributedDataParallel(mlp, gradient_as_bucket_view=True),
    "compiled": lambda mlp: torch.compile(DistributedDataParallel(mlp), backend="eager"),
    "hook": lambda mlp: hooked(mlp, "register_comm_hook", None, default_hooks.fp16_compress_hook),
    "builtin hook": lambda mlp: hooked(
        mlp, "_register_builtin_comm_hook", dist.BuiltinCommHookType.FP16_COMPRESS
    ),
    "unused": unused, "normed": normed,
}  # fmt: skip


def watched(owner, name, before):
    """Call ``before`` with the arguments of each call of a function."""
    right = getattr(owner, name)

    def call(*arguments, **named):
        before(*arguments)
        return right(*arguments, **named)

    setattr(owner, name, call)


def dies_in(owner, name, number):
    """At the call of that number, from 0."""
    left = [number]

    def count(*arguments):
        if left[0] == 0:
            die()
        left[0] -= 1

    watched(owner, name, count)


def before_delta(step, *others, settings):
    """Once workers have completed steps: [rank, step] each."""

    def wait(inner, at, message):
        if at != step:
            return
        for rank, wanted in others:
            journal = journal_of(settings, rank)
            while not any(e["event"] == "step" and e["step"] >= wanted for e in journal.read()):
                time.sleep(0.02)
        die()

    watched(sender, "exchange", wait)


def between_holders(step):
    """A holder has the delta, another has some of it, or nothing."""
    traded = []

    def count(inner, given, sizes):
        traded.append(1)
        if traded == [step, 1, 1]:  # behind the heads
            words, counts = torch.cat(given), [values.numel() for values in given]
            options = dist.AllToAllOptions()
            inner.alltoall_base(words.new_empty(sum(sizes)), words, sizes, counts, options)
            die()

    watched(exchange, "trade", count)
    watched(sender, "exchange", lambda inner, at, message: traded.__setitem__(slice(None), [at]))


def after_step(step, change):
    """Do something to a worker's parity once it has finished a step."""
    right = member.ParityMember.finish_step

    def finish(self, at):
        right(self, at)
        if at == step:
            change(self)

    member.ParityMember.finish_step = finish


def change_unseen(parity):
    """A row, by a write that PyTorch does not count."""
    parity._own.tables[0].weight.data[7] += 1.0


def write_by_hand(parity):
    with torch.no_grad():
        parity._own.tables[0].weight[7] = 0.0


def damage(parity):
    """One bit in the memory of a holder."""
    parity.wait_until_rows_may_change()
    parity._held.words[0] ^= 1


POINTS = {
    "between two holders": between_holders,
    "before the acknowledgement": lambda n: dies_in(sender, "acknowledge", n - 1),
    "before parity is undone": lambda n: dies_in(member.HeldParity, "go_back", n),
    "between two undone steps": lambda n: dies_in(own_rows.OwnRows, "_undo_step", n),
    "decode": lambda n: dies_in(group_codec, "xor_over_group", n),
    "encode": lambda n: dies_in(member.ParityMember, "encode", n),
    "last save": lambda n: dies_in(worker, "save_trained", n),
    "protect": lambda n: dies_in(member.ParityMember, "_start_sending", n),
}
FAULTS = {
    "rows change unseen": lambda: after_step(3, change_unseen),
    "a row is written by hand": lambda: after_step(3, write_by_hand),
    "parity is damaged": lambda: after_step(4, damage),
}


class MlpJob(Job):
    def __init__(self, settings, rank, life):
        super().__init__(settings, rank, life)
        if self.options.get("device"):
            emulated()
        self.draws, self.total = self.options.get("draws"), self.options.get("total")
        if self.draws:
            torch.manual_seed(rank)
        self.trained = None  # the step that this process trained last, since it built the model
        encoding._LEAST_WORDS = 100  # where it is during training, it takes several steps
        where, *numbers = self.death
        if where in POINTS:
            POINTS[where](*numbers)
        if where == "before the delta":
            before_delta(*numbers, settings=settings)
        if fault := self.options.get("faults", {}).get(str(rank)):
            FAULTS[fault]()

    def build(self, group):
        with torch.random.fork_rng(enabled=bool(self.draws)):
            model = self.built(group)
        rows = [model.rows.weight]
        dense = [p for name, p in model.named_parameters() if not name.startswith("rows")]
        made = OPTIMIZERS[self.options.get("optimizer", "adagrad")]
        self.model, self.trained = model, None
        self.optimizers = [made(rows), torch.optim.Adam(dense, lr=0.01)]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizers[1], lambda n: 1 / (1 + n)
        )
        self.first_rows = None
        if "rebuild_rate" in self.options:  # as torch.empty may
            self.first_rows = model.rows.weight.detach().clone()
            model.rows.weight.detach().fill_(float("nan"))
        return model, self.optimizers

    def built(self, group):
        torch.manual_seed(3)
        model = torch.nn.Module()
        self.num_rows = self.total // group.size() if self.total else ROWS
        model.rows = torch.nn.Embedding(self.num_rows, DIM, sparse=True)
        for name in self.options.get("variants", ["plain"]):
            make = VARIANTS["static graph" if self.is_spoiled("layout") else name]
            setattr(model, name, make(Mlp(self.options.get("layers", (DIM, 12, 1)))))
        if self.options.get("shared"):
            model.shared = DistributedDataParallel(torch.nn.EmbeddingBag(ROWS, DIM))
        if self.options.get("keyed"):
            self.map = SlotMap(ROWS)
        return model

    def initialize(self, model):
        """Undo what ``build`` did to rows that nothing else gives their values."""
        if self.first_rows is not None:
            with torch.no_grad():
                model.rows.weight.copy_(self.first_rows)
            self.journal.write("initialized")

    @property
    def make_checkpointer(self):
        return None if self.options.get("shared") else self.checkpointer_of

    def checkpointer_of(self, model, optimizers, directory):
        begin = self.num_rows * self.rank - (2 if self.is_spoiled("plan") else 0)
        total = self.num_rows * self.settings.world_size
        part = TablePart("rows", (begin, begin + self.num_rows), (0, DIM), total, DIM)
        keys = None
        if self.options.get("keyed"):
            scores = {"used": self.map.used}
            keys = cpr_ext.SlotKeys(self.map.key, scores, on_restored=self.map.rebuild)
        weight = model.rows.weight
        table = Table(part.name, weight, optimizers[0], [model.rows], part=part, keys=keys)
        options = {"state": {"scheduler": lambda: self.scheduler.state_dict()}}
        return self.watched(
            *(cpr_ext.Checkpointer, model, optimizers, directory),
            tables=[table],
            **(options if self.draws else {}),
        )

    def train_step(self, job, step):
        if self.draws and step != (0 if self.trained is None else self.trained + 1):
            self.scheduler.load_state_dict(job.state["scheduler"])
        self.between_steps(job, step)
        generator = torch.Generator().manual_seed(1000 * step + job.rank)
        indices = self.draw_indices(job, generator)
        labels = torch.randn(SAMPLES, 1, generator=generator)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        for name in self.options.get("variants", ["plain"]):
            self.backward(name, job.model, indices, labels, step)
        if self.options.get("shared"):
            job.model.shared(indices.unsqueeze(1)).square().mean().backward()
        self.die_if("reduced", step)
        job.optimizers[0].step()
        self.die_if("optimizer", step)
        job.optimizers[1].step()
        if self.options.get("spoil") == ["bit", job.rank, step]:
            job.model.plain.module.layers[0].weight.data.view(torch.int32)[2, 1] ^= 1
        if self.draws:
            self.scheduler.step()
        self.trained = step
        time.sleep(self.settings.step_seconds)
        return SAMPLES * job.world_size

    def backward(self, name, model, indices, labels, step):
        ddp = getattr(model, name)
        mlp = next(module for module in ddp.modules() if isinstance(module, Mlp))
        if self.death == ["forward", step]:
            mlp.at = lambda values: die()
        if self.death == ["backward", step]:  # the last layers' gradients are on their way then
            mlp.at = lambda values: values.register_hook(lambda gradient: die())

        def train():
            values = model.rows(indices)
            values = values * torch.rand(SAMPLES, DIM) if self.draws else values
            ((ddp(values) - labels) ** 2).mean().backward()

        if name == "accumulating":
            with ddp.no_sync():
                train()
        train()

    def draw_indices(self, job, generator):
        if not self.options.get("keyed"):
            return torch.randint(self.num_rows, (SAMPLES,), generator=generator)
        hot = torch.randint(12, (SAMPLES // 2,), generator=generator)
        fresh = torch.randint(10**12, 2**62, (SAMPLES // 2,), generator=generator)
        slots, new = self.map([*hot.tolist(), *fresh.tolist()])
        weight = job.model.rows.weight
        with job.checkpointer.writing_rows(self.job_tables[0].name, new), torch.no_grad():
            weight[new] = 0.1
            self.optimizers[0].state[weight]["sum"][new] = 0.0
        return slots

    def is_spoiled(self, by):
        what, rank, *_ = self.options.get("spoil") or (None, None)
        return (what, rank) == (by, self.rank)

    def observe(self, event):
        super().observe(event)
        if (metrics := getattr(self.worker._parity, "_metrics", None)) is not None:
            known = {name: getattr(metrics, name) for name in METRICS}
            self.journal.write("metrics", step=event.step, at=event.kind, **known)

    def describe(self):
        """All that must end as without failures, beside the rows and their state."""
        modules = [(n, m) for n, m in self.model.named_children() if n != "rows"]
        known = {n: [checksum(p) for p in m.parameters()] for n, m in modules}
        if self.total:
            known["rows"] = self.model.rows.weight.detach().tolist()
        if self.options.get("keyed"):  # with all that the map goes by, in its order
            known["map"] = [[*self.map.slots.items()], self.map.free, self.map.clock]
        if not self.draws:
            return known
        known["state"] = [
            [checksum(value) for value in state.values() if isinstance(value, torch.Tensor)]
            for state in self.optimizers[1].state.values()
        ]
        own = self.optimizers[0].state[self.model.rows.weight].items()
        known["own"] = [
            checksum(torch.get_rng_state()),
            {name: value for name, value in own if not isinstance(value, torch.Tensor)},
            [group["lr"] for group in self.optimizers[1].param_groups],
            [checksum(value) for value in self.model.buffers()],
        ]
        return known
