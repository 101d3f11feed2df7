"""How the workers of a job cut its tables, and what is wrong with that."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import torch

from cpr_ext.state.table_part import TablePart

# Of a part: the whole's name, rows, columns, its shape, type; of another table: columns, type.
Description = tuple[Any, ...]


def describe_table(embedding_dim: int, dtype: torch.dtype, part: TablePart | None) -> Description:
    """Return a worker's description of a table that it holds."""
    if part is None:
        return (embedding_dim, str(dtype))
    return (
        *(part.table, part.rows, part.columns),
        *(part.num_embeddings, part.embedding_dim, str(dtype)),
    )


_Held = tuple[int | str, TablePart, str]


def plan_faults(
    plans: Sequence[Mapping[str, Description]], workers: Sequence[int | str] | None = None
) -> list[str]:
    """Return what is wrong with how workers cut the tables; one sentence each.

    Args:
        plans: by rank, tables by name, each as :func:`describe_table` describes it.
        workers: what to call them; by default by rank.
    """
    parts: dict[str, list[_Held]] = {}
    others: dict[str, dict[Description, list[int | str]]] = {}
    for rank, plan in zip(workers or range(len(plans)), plans, strict=True):
        for name, described in plan.items():
            if len(described) == 2:
                others.setdefault(name, {}).setdefault(described, []).append(rank)
            else:
                whole, rows, columns, num_rows, dim, dtype = described
                part = TablePart(whole, tuple(rows), tuple(columns), num_rows, dim)
                parts.setdefault(whole, []).append((rank, part, dtype))
    found = [
        f"table '{name}' has (columns, type) "
        + "; ".join(f"{kind} on workers {ranks}" for kind, ranks in kinds.items())
        for name, kinds in others.items()
        if len(kinds) > 1
    ]
    return found + [fault for name in parts for fault in _part_faults(name, parts[name])]


def _part_faults(name: str, parts: Sequence[_Held]) -> list[str]:
    kinds = {(p.num_embeddings, p.embedding_dim, dtype) for _, p, dtype in parts}
    if len(kinds) > 1:
        ranks = [rank for rank, _, _ in parts]
        return [f"table '{name}' has (rows, columns, type) {sorted(kinds)} on workers {ranks}"]
    if (found := _find_overlap(parts)) is not None:
        (rank, part, _), (other_rank, other, _) = found
        both = part.overlap(other)
        assert both is not None
        return [f"workers {rank} and {other_rank} both hold '{both.name}'"]
    (rows, columns, _) = kinds.pop()
    held = sum(p.shape[0] * p.shape[1] for _, p, _ in parts)
    if held != rows * columns:
        return [f"table '{name}': no worker holds {rows * columns - held} of its values"]
    return []


def _find_overlap(parts: Sequence[_Held]) -> tuple[_Held, _Held] | None:
    """Return two parts that have values in common, in the order given; None if there are none.

    It goes down the rows, and knows the parts that do not end above. These are disjoint. So a new
    one can only overlap its neighbours by column. Takes n log n steps for n parts.
    """
    order = sorted(range(len(parts)), key=lambda n: parts[n][1].rows)
    here: list[tuple[int, int]] = []  # columns from which parts go, and their numbers
    ends: list[tuple[int, int, int]] = []  # the row at which each one ends
    for number in order:
        part = parts[number][1]
        while ends and ends[0][0] <= part.rows[0]:
            _, column, other = heappop(ends)
            del here[bisect_left(here, (column, other))]
        at = bisect_left(here, (part.columns[0], number))
        for _, other in here[max(0, at - 1) : at + 1]:
            if part.overlap(parts[other][1]) is not None:
                first, second = sorted((number, other))
                return parts[first], parts[second]
        here.insert(at, (part.columns[0], number))
        heappush(ends, (part.rows[1], part.columns[0], number))
    return None
