"""Failures played on one process: which shards are lost when, and what losing one does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cpr_ext import Table
from cpr_ext.errors import UsageError
from cpr_ext.state.table import shard_row_range
from cpr_ext.wings.lab.dlrm.model import initial_rows

_FAILURE = re.compile(r"(\d+):(\d+(?:\+\d+)*)", re.ASCII)


@dataclass(frozen=True, order=True)
class PlannedFailure:
    """After training step ``step`` (counted from 1), ``shards`` are lost."""

    step: int
    shards: tuple[int, ...]


def parse_failure(text: str, num_shards: int) -> PlannedFailure:
    """Read ``STEP:SHARD[+SHARD...]``.

    Raises:
        UsageError: another form, step 0, or a shard that does not exist.
    """
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"failure is {text!r}; write STEP:SHARD[+SHARD...], for example 800:0+3 to lose shards "
            "0 and 3 after step 800"
        )
    step = int(match[1])
    shards = tuple(sorted({int(shard) for shard in match[2].split("+")}))
    if step < 1:
        raise UsageError(f"failure {text!r}: steps count from 1")
    if shards[-1] >= num_shards:
        raise UsageError(
            f"failure {text!r}: there is no shard {shards[-1]}; with {num_shards} shards they are "
            f"0 to {num_shards - 1}"
        )
    return PlannedFailure(step, shards)


@torch.no_grad()
def lose_shards(
    tables: Sequence[Table], shards: Sequence[int], num_shards: int, generator: torch.Generator
) -> int:
    """Reset the rows and per-row optimizer state of ``shards``, as for new tables.

    Returns:
        How many rows were lost.
    """
    num_lost = 0
    for table in tables:
        states = table.row_states()
        for shard in shards:
            begin, end = shard_row_range(table.num_embeddings, shard, num_shards)
            table.weight[begin:end] = initial_rows(
                table.num_embeddings, end - begin, table.embedding_dim, generator
            ).to(table.weight.dtype)
            for name, state in states.items():
                state[begin:end] = _initial_state(table, name)
            num_lost += end - begin
    return num_lost


def _initial_state(table: Table, name: str) -> float:
    """Return what the optimizer gives a row that was never updated."""
    assert table.optimizer is not None
    defaults = table.optimizer.defaults
    return float(defaults.get("initial_accumulator_value", 0.0)) if name == "sum" else 0.0
