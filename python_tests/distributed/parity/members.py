"""Members of a parity group in one process: small models, and connections between threads."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import HashStore

import cpr_ext
from cpr_ext.distributed.collective import torch_private
from cpr_ext.distributed.collective.connections import AddressStore
from cpr_ext.distributed.collective.process_group import Members, Round
from cpr_ext.distributed.parity.held_parity import HeldParity
from cpr_ext.distributed.parity.own_rows import OwnRows
from python_tests.helpers import open_checkpointer

ROWS, DIM = 50, 3


def adagrad(rows):
    return torch.optim.Adagrad(rows, lr=0.1)


class Trainer:
    """One worker's model of two tables, and its parity's listener."""

    def __init__(self, directory, *, parts=2, make=adagrad, seed=0, stride=1, **options):
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.ModuleDict({
            "large": torch.nn.EmbeddingBag(ROWS, DIM, sparse=True),
            "small": torch.nn.EmbeddingBag(7, 5, sparse=True),
            "dense": torch.nn.Linear(DIM + 5, 1),
        })  # fmt: skip
        with torch.no_grad():
            for value in self.model.parameters():
                value.copy_(torch.randn(value.shape, generator=generator))
        tables = [self.model[name].weight for name in ("large", "small")]
        self.optimizers = [make(tables), torch.optim.Adam(self.model["dense"].parameters())]
        self.checkpointer = open_checkpointer(
            *(self.model, self.optimizers, directory),
            **{"schedule": cpr_ext.EverySteps(1000), "save_at_close": False, **options},
        )
        how = {"parts": parts, "delta_bytes": 1 << 20, "stride": stride}
        self.own = OwnRows(self.checkpointer, wait=lambda: None, **how)

    def forward(self, step):
        generator = torch.Generator().manual_seed(step)
        found = [
            self.model[name](torch.randint(rows, (4, 2), generator=generator))
            for name, rows in (("large", ROWS), ("small", 7))
        ]
        return self.model["dense"](torch.cat(found, dim=1) * self.values(step)).square().mean()

    def values(self, step):
        return torch.rand(4, DIM + 5)

    def train(self, step):
        """Train the step that leads to state ``step``."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.forward(step).backward()
        self.exchange(step)
        for optimizer in self.optimizers:
            optimizer.step()
        return self.finish(step)

    def exchange(self, step):
        """What other workers have to do with the gradients."""

    def finish(self, step):
        self.checkpointer.step(4)
        return self.own.finish_step(step)

    def words(self):
        words = torch.empty(self.own.layout.num_words, dtype=torch.int64)
        self.own.layout.read(0, words)
        return words

    def dense(self):
        part = self.checkpointer.session.whole_part()
        return str(part.skeleton), {name: t.tolist() for name, t in part.tensors.items()}


def formed(count, *, host="127.0.0.1", connect_seconds=60.0, seconds=60.0):
    """A group for threads: of each member its end, and the addresses that close it."""
    shared = HashStore()

    def form(rank):
        addresses = AddressStore(shared, connect_seconds)
        group, gloo = torch_private.make_group(addresses, rank, count, connect_seconds, host)
        torch_private.set_time_out(gloo, timedelta(seconds=seconds))
        return Members(group, Round(shared, timedelta(seconds=seconds))), addresses

    return together(*(partial(form, rank) for rank in range(count)))


def connected(count, **options):
    return [group for group, _ in formed(count, **options)]


def together(*calls):
    """Call all at once, each on a thread of its own; returns what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def holding(words, *members, stride=1):
    """Parity of zeros, as of state 0 of these members."""
    held = HeldParity(stride)
    held.words = torch.zeros(words, dtype=torch.int64)
    held.begin(0, members)
    return held
