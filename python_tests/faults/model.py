"""The model of the scenario: two tables and a dense part, trained without any loss to speak of.

Gradients are drawn from torch's generator, so that every update of every row is a new value: a row
tells from which step it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

import cpr_ext
from python_tests.rounding import round_rows

TABLES = {"big": (48, 8), "small": (6, 4)}
SLOT_BYTES = 3 * 4096  # of one chunk
_LOOKUPS = 5
_precisions = ["float32"]  # of partial snapshots, the last one


def use_precision(name: str) -> None:
    """Let partial snapshots keep rows in a precision, from here on, in this process."""
    _precisions.append(name)


def precision() -> cpr_ext.Precision:
    """The precision of the scenario's snapshots."""
    return cpr_ext.Precision(partial=_precisions[-1])


@lru_cache(maxsize=1 << 16)
def as_recovered(table: str, row: bytes) -> bytes:
    """A row of a :class:`State` after a partial snapshot and a recovery."""
    dim = TABLES[table][1]
    weight, state = torch.frombuffer(bytearray(row), dtype=torch.float32).split(dim)
    rounded = round_rows(weight[None], _precisions[-1])[0]
    return _bytes(rounded) + _bytes(state)


class Model(nn.Module):
    """Embeddings and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, dim, sparse=True) for name, (rows, dim) in TABLES.items()}
        )
        self.linear = nn.Linear(4, 2)


def build(seed: int) -> tuple[Model, list[torch.optim.Optimizer]]:
    """A model and its optimizers, all values as ``seed`` says."""
    torch.sparse.check_sparse_tensor_invariants.disable()
    # All generators are saved with the dense part, and Python seeds its own anew in each child.
    torch.manual_seed(seed)
    random.seed(seed)
    model = Model()
    return model, [
        torch.optim.Adagrad(model.tables.parameters(), lr=0.1),
        torch.optim.SGD(model.linear.parameters(), lr=0.1, momentum=0.9),
    ]


def train_step(model: Model, optimizers: list[torch.optim.Optimizer]) -> None:
    """Look rows up and update them, and the dense part."""
    for module in model.tables.values():
        row_ids = torch.randint(module.num_embeddings, (_LOOKUPS,)).unique()
        module(row_ids)
        gradients = torch.randn(len(row_ids), module.embedding_dim)
        size = module.weight.shape
        module.weight.grad = torch.sparse_coo_tensor(
            row_ids[None], gradients, size, check_invariants=False
        ).coalesce()
    for parameter in model.linear.parameters():
        parameter.grad = torch.randn(parameter.shape)
    for optimizer in optimizers:
        optimizer.step()


def wreck_shard(model: Model, optimizers: list[torch.optim.Optimizer], shard: int, of: int) -> None:
    """What the loss of a shard leaves: other values in its rows and their state."""
    with torch.no_grad():
        for module in model.tables.values():
            rows = slice(*(s * module.num_embeddings // of for s in (shard, shard + 1)))
            module.weight[rows] = 7.0
            optimizers[0].state[module.weight]["sum"][rows] = 7.0


@dataclass(frozen=True)
class State:
    """Everything that a snapshot saves: the dense part, and each row with its optimizer state."""

    dense: bytes
    rows: dict[str, list[bytes]]

    @classmethod
    def of(cls, model: Model, optimizers: list[torch.optim.Optimizer]) -> State:
        """The state of a model now."""
        adagrad, sgd = optimizers
        parts = [torch.get_rng_state()]
        for parameter in model.linear.parameters():
            momentum = sgd.state[parameter].get("momentum_buffer")
            parts.append(parameter)
            parts.append(torch.zeros_like(parameter) if momentum is None else momentum)
        rows = {}
        for name, module in model.tables.items():
            state = adagrad.state[module.weight]
            parts.append(state["step"])
            both = torch.cat([module.weight.detach(), state["sum"]], dim=1)
            rows[name] = [row.tobytes() for row in both.numpy()]
        return cls(b"".join(_bytes(part) for part in parts), rows)

    def to_bytes(self) -> bytes:
        """All of it in a row; every state has the same size."""
        return b"".join([self.dense, *(row for rows in self.rows.values() for row in rows)])

    @classmethod
    def from_bytes(cls, content: bytes) -> State:
        """Inverse of :meth:`to_bytes`."""
        at = len(content) - _rows_bytes()
        dense, rows = content[:at], {}
        for name, (count, dim) in TABLES.items():
            size = 2 * 4 * dim
            rows[name] = [content[at + i * size : at + (i + 1) * size] for i in range(count)]
            at += count * size
        return cls(dense, rows)

    @classmethod
    def size_bytes(cls) -> int:
        """Size of every state."""
        dense = torch.get_rng_state().numel() + 2 * 4 * (4 * 2 + 2) + 4 * len(TABLES)
        return dense + _rows_bytes()


def _rows_bytes() -> int:
    return sum(count * 2 * 4 * dim for count, dim in TABLES.values())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()
