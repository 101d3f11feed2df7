"""The model, the set-up and the kept states of a training loop next to a plain reference."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROWS = {"a": 1600, "b": 600}
NEVER = 10**9


class OwnForward(nn.Embedding):
    """Takes a mask, not row ids, as the positions of some language models do."""

    def forward(self, mask):
        rows = mask.nonzero().view(-1) + 2
        return F.embedding(rows, self.weight, sparse=self.sparse)


class Model(nn.Module):
    def __init__(self, sparse, *, is_tied, seed):
        super().__init__()
        self.a = nn.Embedding(ROWS["a"], 8, sparse=sparse[0])
        self.b = OwnForward(ROWS["b"], 4, sparse=sparse[1])
        self.head = nn.Linear(4, 2)
        self.decoder = nn.Linear(8, ROWS["a"], bias=False) if is_tied else None
        if is_tied:
            self.decoder.weight = self.a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids, mask):
        self.seen += 1
        b = self.b(mask)
        a = self.a(ids)
        loss = a.sin().sum() + self.head(b.sin()).square().mean()
        if self.decoder is not None:
            loss = loss + 0.01 * self.decoder(a[:2]).sin().sum()
        return loss


@dataclass(frozen=True)
class Setup:
    """How one example trains and saves.

    Attributes:
        kinds: optimizers of the tables, by ``TABLE_OPTIMIZERS``.
        sparse: whether the tables' gradients are.
        is_shared: one optimizer, of the first kind, has both tables.
        is_tied: table a's weight is a linear layer's, too.
        has_short_windows: capture that overlaps training gets a chunk done in each window.
    """

    kinds: tuple[str, str]
    sparse: tuple[bool, bool]
    is_shared: bool
    is_tied: bool
    has_short_windows: bool
    options: dict


@dataclass
class Moment:
    """All that there is, at a moment.

    Attributes:
        touched: by table, when each row was last changed, as gradients say.
    """

    time: int
    rows: dict
    state: dict
    touched: dict


def same_rows(left, right):
    """Which rows (n,) of two mappings from array names to tensors are equal in every bit."""
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    same = None
    for name, one in left.items():
        count = one.shape[0]
        bits = [
            t.detach().contiguous().view(torch.uint8).reshape(count, -1)
            for t in (one.reshape(count, -1), right[name].reshape(count, -1))
        ]
        equal = (bits[0] == bits[1]).all(dim=1)
        same = equal if same is None else same & equal
    return same
