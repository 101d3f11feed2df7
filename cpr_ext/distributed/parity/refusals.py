"""What parity cannot protect, refused before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpr_ext.distributed.parity.options import Parity
from cpr_ext.errors import UsageError
from cpr_ext.state.table import ChangeSource, Table

_MEMORY = Path("/proc/meminfo")
# Deltas in memory at once, in steps: two kept and one being made here, two kept of peers.
_DELTAS = 5


def refuse_devices(tables: Sequence[Table], devices: Sequence[int]) -> None:
    """Refuse tables in the memory of a GPU.

    Args:
        devices: GPUs that have tables.

    Raises:
        UsageError: names the tables and the remedy.
    """
    if devices:
        names = [table.name for table in tables if table.weight.device.type != "cpu"]
        raise UsageError(
            f"tables {names or [table.name for table in tables]} cannot be protected by parity: "
            f"GPUs {list(devices)} have them; keep them in CPU memory, or leave out parity= and "
            'use recovery="partial"'
        )


def refuse_unprotected(tables: Sequence[Table], parity: Parity) -> None:
    """Refuse tables whose changes no delta would have.

    Raises:
        UsageError: names the table, why, and the remedy.
    """
    for table in tables:
        if (reason := _why_refused(table, parity.delta_bytes)) is not None:
            raise UsageError(f"table '{table.name}' cannot be protected by parity: {reason}")


def require_memory(tables: Sequence[Table], parity: Parity) -> None:
    """Refuse a job whose parity would not fit into this machine's memory.

    Raises:
        UsageError: names what is needed and what is free.
    """
    rows = sum(row_bytes(table) * table.num_embeddings for table in tables)
    copies = sum(a.nbytes for table in tables for a in table.key_arrays().values())
    needed = rows // (parity.group_size - 1) + _DELTAS * min(parity.delta_bytes, rows) + copies
    free = free_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"parity needs up to {needed} bytes on this worker, {free} are free: use larger groups "
            "(group_size), or a smaller delta_bytes, or more memory"
        )


def free_bytes() -> int | None:
    """Memory that this machine can give; None: it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def row_bytes(table: Table) -> int:
    """Bytes of a row with its per-row state."""
    return sum(values[0].numel() * values.element_size() for values in table.arrays().values())


def _why_refused(table: Table, delta_bytes: int) -> str | None:
    if table.lookups is not None and not isinstance(table.lookups, ChangeSource):
        return (
            f"a fused kernel changes it, and its {type(table.lookups).__name__} does not say when: "
            "give it watch_changes() of cpr_ext.state.table.ChangeSource"
        )
    if table.optimizer is None and table.lookups is None and table.weight.requires_grad:
        return "no torch optimizer updates it; give its optimizer to the Checkpointer"
    if any(getattr(module, "max_norm", None) is not None for module in table.modules):
        return (
            "its module has a max_norm, by which the forward pass changes rows outside the "
            "optimizer; leave it out, or limit the norms of rows in the optimizer's step"
        )
    whole = row_bytes(table) * table.num_embeddings
    if not table.updates_only_looked_up_rows() and whole > delta_bytes // 4:
        kind = "its fused optimizer" if table.lookups else type(table.optimizer).__name__
        return (
            f"{kind}, as it is set, changes every row at each step, {whole} bytes. Use SGD without "
            "momentum, Adagrad, SparseAdam or row-wise Adagrad, without weight decay; or raise "
            "Parity(delta_bytes=...) to four times that"
        )
    return None
