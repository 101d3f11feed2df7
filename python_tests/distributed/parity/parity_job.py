"""A job with parity whose workers kill themselves at named points of the protocol.

``Settings.suicides``: rank -> life -> [point, number], see ``POINTS``. ``Settings.options``: as of
``DrawingJob``, ``group_size``, ``parity_every``, ``encode_rate``, ``rebuild_rate`` (then ``build``
leaves rows without values), ``optimizer`` of the table, and ``faults``: rank -> a point at which it
does not kill itself.
"""

import time

import torch

from cpr_ext.distributed import Parity, worker
from cpr_ext.distributed.collective.comparison import checksum
from cpr_ext.distributed.parity import encoding, exchange, group_codec, member, own_rows, sender
from cpr_ext.wings.lab.dlrm.rowwise_adagrad import RowWiseAdagrad
from python_tests.distributed.mlp_job import DrawingJob, die
from python_tests.distributed.sharded_job import journal_of

OPTIMIZERS = {
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.1),
    "rowwise": lambda rows: RowWiseAdagrad(rows, lr=0.1),
    "sparse adam": lambda rows: torch.optim.SparseAdam(rows, lr=0.01),
    "momentum": lambda rows: torch.optim.SGD(rows, lr=0.1, momentum=0.9),
}


METRICS = ("protected", "lag_steps", "bytes_sent", "rebuild_progress", "rebuilds")


def before_delta(step, until=lambda: None):
    right = sender.exchange

    def watched(inner, at, message):
        if at == step:
            until()
            die()
        return right(inner, at, message)

    sender.exchange = watched


def between_holders(step):
    """One holder has the delta, or half of it; the others have nothing."""
    trading, sending, sent = sender.exchange, exchange.send_to, []

    def watched(inner, at, message):
        sent[:] = [at]
        return trading(inner, at, message)

    def counted(inner, to, message):
        if sent == [step, 1]:
            die()
        sending(inner, to, message)
        sent.append(1)

    sender.exchange, exchange.send_to = watched, counted


def dies_in(owner, name, number):
    """At the call of that number, from 0."""
    right, calls = getattr(owner, name), []

    def watched(*arguments, **named):
        if len(calls) == number:
            die()
        calls.append(1)
        return right(*arguments, **named)

    setattr(owner, name, watched)


def wait_for_steps(settings, steps):
    """Return once workers have completed steps: [[rank, step], ...]."""
    for rank, step in steps:
        journal = journal_of(settings, rank)
        while not any(e["event"] == "step" and e["step"] >= step for e in journal.read()):
            time.sleep(0.02)


def rows_change_unseen(number):
    """The row of that number, by a write that PyTorch does not count, before the 4th step."""
    right, steps = member.ParityMember.finish_step, []

    def watched(self, step):
        right(self, step)
        steps.append(step)
        if len(steps) == 3:
            self._own.tables[0].weight.data[number] += 1.0

    member.ParityMember.finish_step = watched


def row_is_written(number):
    """The row of that number, by hand, before the 4th step."""
    right, steps = member.ParityMember.finish_step, []

    def watched(self, step):
        right(self, step)
        steps.append(step)
        if len(steps) == 3:
            with torch.no_grad():
                self._own.tables[0].weight[number] = 0.0

    member.ParityMember.finish_step = watched


def parity_is_damaged(number):
    """One bit in the memory of a holder, after its step of that number."""
    right = member.ParityMember.finish_step

    def watched(self, step):
        right(self, step)
        if step == number:
            self.wait_until_rows_may_change()
            self._held.words[0] ^= 1

    member.ParityMember.finish_step = watched


POINTS = {
    "before the delta": before_delta,
    "between two holders": between_holders,
    "before the acknowledgement": lambda n: dies_in(sender, "acknowledge", n - 1),
    "before parity is undone": lambda n: dies_in(member.HeldParity, "go_back", n),
    "between two undone steps": lambda n: dies_in(own_rows.OwnRows, "_undo_step", n),
    "decode": lambda n: dies_in(group_codec, "xor_over_group", n),
    "encode": lambda n: dies_in(member.ParityMember, "encode", n),
    "last save": lambda n: dies_in(worker, "save_trained", n),
    "rows change unseen": rows_change_unseen,
    "a row is written by hand": row_is_written,
    "parity is damaged": parity_is_damaged,
    "protect": lambda n: dies_in(member.ParityMember, "_start_sending", n),
}


class ParityJob(DrawingJob):
    def __init__(self, settings, rank, life):
        super().__init__(settings, rank, life)
        encoding._LEAST_WORDS = 100  # where it is during training, it takes several steps
        point, *numbers = self.suicide or settings.options.get("faults", {}).get(str(rank), (None,))
        if point == "before the delta, late":
            before_delta(numbers[0], lambda: wait_for_steps(settings, numbers[1:]))
        elif point in POINTS:
            POINTS[point](*numbers)

    def build(self, group):
        model, optimizers = super().build(group)
        made = OPTIMIZERS[self.settings.options.get("optimizer", "adagrad")]
        self.optimizers = [made(list(model.rows.parameters())), optimizers[1]]
        self.first_rows = None
        if "rebuild_rate" in self.settings.options:  # as torch.empty may
            self.first_rows = model.rows.weight.detach().clone()
            model.rows.weight.detach().fill_(float("nan"))
        return model, self.optimizers

    def initialize(self, model):
        """Undo what ``build`` did to rows that nothing else gives their values."""
        if self.first_rows is not None:
            with torch.no_grad():
                model.rows.weight.copy_(self.first_rows)
            self.journal.write("initialized")

    def train_step(self, job, step):
        if step == 0 and self.trained is not None:  # all went back to the very beginning
            self.scheduler.load_state_dict(job.state["scheduler"])
        return super().train_step(job, step)

    def worker_options(self):
        options = super().worker_options()
        if self.settings.recovery in ("exact", "partial"):
            known = self.settings.options
            options["parity"] = Parity(
                group_size=known["group_size"],
                every_steps=self.own_option(known.get("parity_every", 1)),
                encode_bytes_per_second=known.get("encode_rate"),
                rebuild_bytes_per_second=known.get("rebuild_rate"),
            )
        return options

    def own_option(self, given):
        return given[self.rank] if isinstance(given, list) else given

    def observe(self, event):
        own = getattr(self.worker._parity, "_own", None)
        self.settings.digests = own is None or not own.missing.is_any  # of all rows, or none
        super().observe(event)
        if (metrics := getattr(self.worker._parity, "_metrics", None)) is not None:
            known = {name: getattr(metrics, name) for name in METRICS}
            self.journal.write("metrics", step=event.step, at=event.kind, **known)

    def describe(self):
        """All that must end as without failures, beside the rows and their state."""
        states = [
            [checksum(value) for value in state.values() if isinstance(value, torch.Tensor)]
            for state in self.optimizers[1].state.values()
        ]
        generator = checksum(torch.get_rng_state())
        rows = {
            name: value
            for name, value in self.optimizers[0].state[self.model.rows.weight].items()
            if not isinstance(value, torch.Tensor)
        }
        rates = [group["lr"] for group in self.optimizers[1].param_groups]
        buffers = [checksum(value) for value in self.model.buffers()]
        return {**super().describe(), "state": states, "own": [generator, rows, rates, buffers]}
